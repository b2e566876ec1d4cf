"""BlockStore under any sequence of calls: every slot in one state, no double use, leases kept, space shared fairly."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.support.storemodel import Lying, StoreModel
from twostroke.errors import NotFound, Overloaded
from twostroke.kv.barrier import Waiter
from twostroke.kv.limits import StoreLimits
from twostroke.kv.refs import Reservation, Terms
from twostroke.kv.store import BlockStore

SLOTS = 6
LIMITS = StoreLimits(
    leases=3,
    lease_blocks=4,
    lease_seconds=8.0,
    reservation_seconds=5.0,
    namespace_share=0.7,  # 4 slots
    keep_share=0.5,  # 2 blocks
    keep_seconds=9.0,
    waiting=2,
)
WRITERS = st.sampled_from(["w", "x"])
SECONDS = st.floats(0.1, 12.0)
ALL_KEYS = [name.to_bytes(16, "little") for name in range(10)]
KEYS = st.lists(st.sampled_from(ALL_KEYS), min_size=1, max_size=4)
LEASES = st.integers(0, 6)  # which of those that are alive; 0 is none of them
NAMESPACES = st.sampled_from(["m", "n"])
TERMS = st.builds(Terms, namespace=NAMESPACES, transient=st.booleans())


@dataclass(eq=False)
class Waiting:
    """A call that waits, and what it has seen of its keys."""

    keys: list[bytes]
    woken: list[None] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)  # held or being written, at some moment
    waiter: Waiter | None = None


class StoreMachine(RuleBasedStateMachine):
    """The store beside a model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(SLOTS, LIMITS)
        self.model = StoreModel(SLOTS, LIMITS)
        self.opened = 0
        self.generations: Counter[int] = Counter()
        self.waiting: list[Waiting] = []

    reservations = Bundle("reservations")

    def lease(self, which: int) -> str:
        alive = [lease for lease in self.model.ends if self.model.alive(lease)]
        return alive[which % len(alive)] if which and alive else "lease-0"

    @rule(seconds=SECONDS)
    def open_lease(self, seconds: float) -> None:
        name = f"lease-{self.opened}"
        self.opened += 1
        try:
            granted = self.store.open_lease(name, seconds, self.model.now)
        except Overloaded:
            assert len(self.model.ends) == LIMITS.leases
            return
        assert granted == min(seconds, LIMITS.lease_seconds)
        self.model.ends[name], self.model.keeps[name] = self.model.now + granted, set()

    @rule(which=LEASES, seconds=SECONDS)
    def renew(self, which: int, seconds: float) -> None:
        lease = self.lease(which)
        alive = self.store.renew([lease], seconds, self.model.now)
        assert bool(alive) == self.model.alive(lease)
        if alive:
            until = self.model.now + min(seconds, LIMITS.lease_seconds)
            self.model.ends[lease] = max(self.model.ends[lease], until)

    @rule(which=LEASES)
    def release(self, which: int) -> None:
        lease = self.lease(which)
        self.store.release([lease])
        self.model.end([lease])

    @rule(which=LEASES, keys=KEYS)
    def acquire(self, which: int, keys: list[bytes]) -> None:
        lease = self.lease(which)
        try:
            places = self.store.acquire(lease, keys)
        except NotFound:
            assert not self.model.alive(lease)
            return
        assert [place.block.key for place in places] == keys[: len(places)]
        assert all(self.model.sees(key, lease) for key in keys[: len(places)])
        self.model.used(lease, places)

    @rule(target=reservations, which=LEASES, writer=WRITERS, keys=KEYS, terms=TERMS)
    def reserve(self, which: int, writer: str, keys: list[bytes], terms: Terms) -> object:
        return multiple(*self.reserved(self.lease(which), writer, keys, terms))

    @rule(keys=KEYS, terms=TERMS, release=st.booleans())
    def write(self, keys: list[bytes], terms: Terms, release: bool) -> None:
        """All of it at once, as most of a store's life is."""
        self.open_lease(8.0)
        lease = self.lease(-1)
        for each in self.reserved(lease, "w", keys, terms):
            self.commit(-1, each, 16, False)
        if release:
            self.release(-1)

    def reserved(self, lease: str, writer: str, keys: list[bytes], terms: Terms) -> Sequence[Reservation]:
        wanted = {key for key in keys if not self.model.find(key) and not self.model.written(key)}
        others = {key for key in keys if self.model.written(key)}
        try:
            reserved = self.store.reserve(lease, writer, keys, self.model.now, terms)
        except NotFound:
            assert not self.model.alive(lease)
            return ()
        assert set(reserved.writing) == others
        if not terms.transient:
            self.model.made_ordinary(keys)
        self.model.used(lease, reserved.held)
        for each in reserved.slots:
            assert each.generation > self.generations[each.slot]
            self.generations[each.slot] = each.generation
            self.model.given(each, writer, terms)
            for waiting in self.waiting:
                waiting.seen |= {each.key}.intersection(waiting.keys)
        if wanted - {each.key for each in reserved.slots}:
            self.model.refused(terms.namespace)
        return reserved.slots

    @rule(which=LEASES, reservation=consumes(reservations), tokens=st.integers(1, 16), twice=st.booleans())
    def commit(self, which: int, reservation: Reservation, tokens: int, twice: bool) -> None:
        lease = self.lease(which)
        place = reservation.written(tokens)
        copy = self.model.copying.get(reservation.slot)
        if copy and copy.reservation == reservation:
            del self.model.copying[reservation.slot]
        else:
            copy = None
        in_time = copy is not None and copy.until > self.model.now
        committed = self.store.commit(lease, [place])
        if committed.leased:
            assert self.model.alive(lease)
            assert in_time
        if copy and in_time and (committed.leased or not copy.terms.transient):
            assert committed.published == (place,)
            self.model.lying[place.slot] = Lying(place, copy.terms.namespace, copy.terms.transient)
            self.model.keeps.get(lease, set()).update({place} if committed.leased else ())
        else:
            assert not committed.published
        if twice:
            again = self.store.commit(lease, [place])
            assert (again.published, again.leased) == ((), committed.leased)

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation) -> None:
        self.store.abandon([reservation])
        if (copy := self.model.copying.get(reservation.slot)) and copy.reservation == reservation:
            del self.model.copying[reservation.slot]

    @rule(writer=WRITERS)
    def a_writer_dies(self, writer: str) -> None:
        self.store.writer_gone(writer)
        self.model.copying = {slot: copy for slot, copy in self.model.copying.items() if copy.writer != writer}

    @rule(namespace=NAMESPACES, keys=KEYS, seconds=st.one_of(st.just(0.0), SECONDS))
    def keep(self, namespace: str, keys: list[bytes], seconds: float) -> None:
        kept = self.store.keep(namespace, keys, seconds, self.model.now)
        blocks = [self.model.find(key) for key in keys]
        mine = [each and each.namespace == namespace and not each.transient for each in blocks]
        until = self.model.now + min(seconds, LIMITS.keep_seconds)
        for index, block in enumerate(blocks):
            if block and mine[index]:
                if not seconds:
                    block.kept_until = 0.0
                elif index < kept:
                    block.kept_until, block.forgotten = max(block.kept_until, until), False
        assert all(mine[:kept])
        if seconds and kept < len(keys) and mine[kept]:
            assert self.kept(namespace) == self.model.keepable
        assert self.kept(namespace) <= self.model.keepable

    def kept(self, namespace: str) -> int:
        return sum(each.namespace == namespace and each.kept_until > 0 for each in self.model.lying.values())

    @rule(namespace=NAMESPACES, keys=KEYS)
    def forget(self, namespace: str, keys: list[bytes]) -> None:
        forgotten = self.store.forget(namespace, keys)
        for block in (block for key in keys if (block := self.model.find(key))):
            if block.namespace == namespace and not block.transient:
                block.kept_until = 0.0
                block.forgotten |= not self.model.leased(block)
        assert forgotten <= len(keys)

    @rule(keys=KEYS)
    def wait(self, keys: list[bytes]) -> None:
        waiting = Waiting(keys)
        try:
            waiting.waiter = self.store.wait(keys, lambda: waiting.woken.append(None))
        except Overloaded:
            assert len(self.waiting) == LIMITS.waiting
        else:
            self.waiting.append(waiting)

    @rule()
    def stop_waiting(self) -> None:
        if self.waiting:
            waiter = self.waiting.pop(0).waiter
            assert waiter is not None
            self.store.leave(waiter)

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.model.advance(seconds)
        self.store.expire(self.model.now)

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        stats, model = self.store.stats(), self.model
        assert stats.free + stats.reserved + stats.quarantined + stats.committed == stats.slots == SLOTS
        late = sum(copy.until <= model.now for copy in model.copying.values())
        assert (stats.free, stats.reserved, stats.quarantined) == (model.free, len(model.copying) - late, late)
        assert stats.leases == len(model.ends)
        assert stats.transient == sum(each.transient for each in model.lying.values())
        assert (stats.evictions, stats.expired_keeps) == (model.evictions, model.expired)
        assert stats.kept == sum(each.kept_until > 0 for each in model.lying.values())
        assert stats.namespaces == sum(model.held(each) > 0 for each in ("m", "n"))

    @invariant()
    def no_namespace_is_over_its_quota(self) -> None:
        assert max(self.model.held(each) for each in ("m", "n")) <= self.model.quota

    @invariant()
    def what_a_lease_keeps_stays_where_it_is(self) -> None:
        for lease, places in self.model.keeps.items():
            for place in places:
                assert self.store.leased(lease, place.block.key) == place
        assert self.store.stats().leased_blocks == len(set().union(*self.model.keeps.values()))

    @invariant()
    def a_transient_block_is_seen_under_its_leases_only(self) -> None:
        for key in ALL_KEYS:
            for lease in ("", *self.model.keeps):
                assert self.store.lookup([key], lease) == self.model.sees(key, lease)

    @invariant()
    def whoever_waits_is_woken_once_when_all_is_there_or_nothing_will_come(self) -> None:
        for each in self.waiting:
            missing = [key for key in each.keys if not self.model.sees(key)]
            written = [key for key in missing if self.model.written(key)]
            lost = each.seen.intersection(missing).difference(written)
            assert len(each.woken) <= 1
            if not missing or (lost and not written):
                assert each.woken
            each.seen |= set(each.keys).difference(missing).union(written)
            if each.keys and not each.seen:
                assert not each.woken

    def teardown(self) -> None:
        """Whatever happened: once writers and leases are gone every slot can be had again, by whoever has none."""
        for writer in ("w", "x"):
            self.store.writer_gone(writer)
        self.store.expire(self.model.now + 1_000.0)
        self.store.open_lease("last", 1.0, self.model.now)
        for name in range(SLOTS):
            wanted = [(1_000 + name).to_bytes(16, "little")]
            assert self.store.reserve("last", "w", wanted, self.model.now, Terms(namespace=str(name))).slots


StoreMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
test_store = StoreMachine.TestCase
