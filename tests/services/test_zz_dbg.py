import asyncio
from tests.services.test_kvstore import *
async def test_x(tmp_path):
    async with calling(tmp_path) as caller:
        await caller.attach()
        call = caller.stub.Write(timeout=5)
        await call.write(pb.WriteRequest(incarnation=caller.incarnation, lease_duration=TEN))
        print("written")
        await call.write(piece(BLOCK[:9], key=key(1)))
        for _ in range(10):
            await asyncio.sleep(0.05)
            print(caller.store.stats, call.done())
            if call.done(): print(await call.code(), await call.details())
        call.cancel()
        for _ in range(10):
            await asyncio.sleep(0.05)
            print(caller.store.stats)
