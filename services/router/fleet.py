"""The fleet: all workers, whether they are there, and the model they agree on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.router.member import Member
from twostroke.cluster import ModelInfo, Role, WorkerInfo
from twostroke.errors import FormatMismatch, InvalidRequest, TwostrokeError, Unavailable
from twostroke.kv.format import KvFormat
from twostroke.text.bundle import MAX_BUNDLE_BYTES, TokenizerBundle
from twostroke.text.template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2  # between attempts to reach a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router needs of a model: how text becomes tokens, and which blocks are shared."""

    info: ModelInfo
    kv_format: KvFormat
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int  # Unix time at which the router first saw it

    def require_equal(self, other: WorkerInfo, *, who: str) -> None:
        """Raise FormatMismatch naming the first field in which a worker's model or blocks differ from these."""
        self.kv_format.require_equal(other.kv_format, who=who)
        for field in dataclasses.fields(self.info):
            if field.name != "context_tokens" and getattr(self.info, field.name) != getattr(other.model, field.name):
                raise FormatMismatch(f"{field.name} of the model differs at {who}", field=f"model.{field.name}")

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises InvalidRequest when the model has none."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead", field="messages")
        return self.template


class Fleet:
    """Watches every worker for as long as `running` lasts."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], silence_seconds: float, on_lost: Callable[[str], None]
    ) -> None:
        self.members = [Member(address, Role.PREFILL, silence_seconds) for address in prefill]
        self.members += [Member(address, Role.DECODE, silence_seconds) for address in decode]
        self._model: ServedModel | None = None
        self._was_whole = False
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._learning = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, prefill: Sequence[str], decode: Sequence[str], silence_seconds: float, on_lost: Callable[[str], None]
    ) -> AsyncIterator[Fleet]:
        """Watch the workers inside the block; `on_lost` is told the address of each that goes away, or is silent."""
        fleet = cls(prefill, decode, silence_seconds, on_lost)
        tasks = [
            asyncio.create_task(fleet._follow(member), name=f"follow {member.address}") for member in fleet.members
        ]
        try:
            yield fleet
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for member in fleet.members:
                await member.close()

    def available(self, role: Role) -> list[Member]:
        """Workers that may be given work of this kind."""
        return [member for member in self.members if member.role is role and member.available]

    @property
    def model(self) -> ServedModel | None:
        """The model served; None until the fleet was ready for the first time.

        Before that a request is refused. Afterwards it waits for a worker that is away, which is likely to come back.
        """
        return self._model if self._was_whole else None

    @property
    def kv_format(self) -> KvFormat | None:
        """What blocks are made of; None until the first worker is known."""
        return None if self._model is None else self._model.kv_format

    @property
    def stores(self) -> list[str]:
        """Addresses of the store nodes that available workers use."""
        used = dict.fromkeys(member.load.store for member in self.members if member.available)
        return [address for address in used if address]

    @property
    def readiness(self) -> str | None:
        """None when a request can be served, else why not."""
        if self._model is None:
            return "no worker has loaded the model yet"
        for role in Role:
            if not self.available(role):
                return f"no {role.value} worker is available"
        return None

    async def changed(self) -> None:
        """Return when a worker came or went."""
        await self._changed.wait()

    async def _follow(self, member: Member) -> None:
        said = ""
        while True:
            try:
                info = await member.introduce()
                await self._agree(member, info)
                self._joined(member, info)
                said = ""
                await member.watch(self._tell)
            except TwostrokeError as error:
                if member.info is None and error.message != said:
                    said = error.message  # once for each cause, not at every attempt
                    log.info("worker not reached", extra={"worker": member.address, "error": said})
            except Exception:  # a defect in one follower must not blind the router to its worker
                log.exception("following a worker failed", extra={"worker": member.address})
            self._left(member)
            await asyncio.sleep(RETRY_SECONDS)

    def _joined(self, member: Member, info: WorkerInfo) -> None:
        member.info = info
        log.info("worker joined", extra={"worker": member.address, "role": info.role.value})
        self._tell()

    def _left(self, member: Member) -> None:
        if member.info is None:
            return
        member.forget()
        log.warning("worker left", extra={"worker": member.address, "role": member.role.value})
        self._on_lost(member.address)
        self._tell()

    def _tell(self) -> None:
        self._was_whole = self._was_whole or self.readiness is None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _agree(self, member: Member, info: WorkerInfo) -> None:
        """Take the first worker's model as the fleet's; every later one must have the same. Raises FormatMismatch."""
        async with self._learning:
            alone = not any(each.available for each in self.members)
            if self._model is None or (alone and self._model.info != info.model):
                self._model = await self._learn(member, info)
            self._model.require_equal(info, who=member.address)
            if info.model.context_tokens < self._model.info.context_tokens:  # the smallest worker bounds what fits
                self._model = dataclasses.replace(self._model, info=info.model)

    async def _learn(self, member: Member, info: WorkerInfo) -> ServedModel:
        raw = await member.tokenizer(MAX_BUNDLE_BYTES)
        return await asyncio.to_thread(_served_model, info, raw)


def _served_model(info: WorkerInfo, raw: bytes) -> ServedModel:
    bundle = TokenizerBundle.from_bytes(raw)
    if bundle.digest != info.model.tokenizer_digest:
        raise Unavailable("the tokenizer that arrived is not the one announced")
    return ServedModel(
        info=info.model,
        kv_format=info.kv_format,
        tokenizer=Tokenizer(bundle),
        template=None if bundle.chat_template is None else ChatTemplate.from_bundle(bundle),
        created=int(time.time()),
    )
