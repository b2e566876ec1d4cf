"""BlockStore under any sequence of calls: every slot in one state, no double use, leases kept, generations grow."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from twostroke.errors import NotFound, Overloaded
from twostroke.kv.limits import StoreLimits
from twostroke.kv.refs import BlockSlot, Reservation
from twostroke.kv.store import BlockStore

SLOTS = 5
LIMITS = StoreLimits(leases=3, lease_blocks=4, lease_seconds=8.0, reservation_seconds=5.0)
WRITERS = st.sampled_from(["w", "x"])
SECONDS = st.floats(0.1, 12.0)
KEYS = st.lists(st.integers(0, 8).map(lambda name: name.to_bytes(16, "little")), max_size=6)


class StoreMachine(RuleBasedStateMachine):
    """Keeps its own small account beside the store: who copies into which slot, and which lease keeps which block."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(SLOTS, LIMITS)
        self.now = 0.0
        self.opened = 0
        self.ends: dict[str, float] = {}
        self.keeps: dict[str, set[BlockSlot]] = {}
        self.copying: dict[int, tuple[Reservation, str]] = {}  # by slot: a writer may be writing there
        self.generations: Counter[int] = Counter()

    leases = Bundle("leases")
    reservations = Bundle("reservations")

    def alive(self, lease: str) -> bool:
        return self.ends.get(lease, 0.0) > self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)
        for lease in [lease for lease in self.ends if not self.alive(lease)]:
            self.forget(lease)

    def forget(self, lease: str) -> None:
        self.ends.pop(lease, None)
        self.keeps.pop(lease, None)

    @rule(target=leases, seconds=SECONDS)
    def open_lease(self, seconds: float) -> object:
        name = f"lease-{self.opened}"
        self.opened += 1
        try:
            granted = self.store.open_lease(name, seconds, self.now)
        except Overloaded:
            assert len(self.ends) == LIMITS.leases
            return multiple()
        assert granted == min(seconds, LIMITS.lease_seconds)
        self.ends[name], self.keeps[name] = self.now + granted, set()
        return name

    @rule(lease=leases, seconds=SECONDS)
    def renew(self, lease: str, seconds: float) -> None:
        alive = self.store.renew([lease], seconds, self.now)
        assert bool(alive) == self.alive(lease)
        if alive:
            self.ends[lease] = max(self.ends[lease], self.now + min(seconds, LIMITS.lease_seconds))

    @rule(lease=leases)
    def release(self, lease: str) -> None:
        self.store.release([lease])
        self.forget(lease)

    @rule(lease=leases, keys=KEYS)
    def acquire(self, lease: str, keys: list[bytes]) -> None:
        try:
            places = self.store.acquire(lease, keys)
        except NotFound:
            assert not self.alive(lease)
            return
        assert [place.block.key for place in places] == keys[: len(places)]
        self.keeps[lease].update(places)

    @rule(target=reservations, lease=leases, writer=WRITERS, keys=KEYS)
    def reserve(self, lease: str, writer: str, keys: list[bytes]) -> object:
        try:
            reserved = self.store.reserve(lease, writer, keys, self.now)
        except NotFound:
            assert not self.alive(lease)
            return multiple()
        kept = {place.slot for places in self.keeps.values() for place in places}
        self.keeps[lease].update(reserved.held)
        for each in reserved.slots:
            assert each.slot not in self.copying  # nobody else may still be writing there
            assert each.slot not in kept  # and nobody reads there under a lease
            assert each.generation > self.generations[each.slot]
            self.generations[each.slot] = each.generation
            self.copying[each.slot] = (each, writer)
        return multiple(*reserved.slots)

    @rule(lease=leases, reservation=consumes(reservations), tokens=st.integers(1, 16), twice=st.booleans())
    def commit(self, lease: str, reservation: Reservation, tokens: int, twice: bool) -> None:
        place = reservation.written(tokens)
        for _ in range(1 + twice):
            committed = self.store.commit(lease, [place])
            assert set(committed.published) <= {place}
            if committed.leased:
                assert self.alive(lease)
                assert self.store.leased(lease, reservation.key) == place
                self.keeps[lease].add(place)
            self.ended(reservation)

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation) -> None:
        self.store.abandon([reservation])
        self.ended(reservation)

    def ended(self, reservation: Reservation) -> None:
        if self.copying.get(reservation.slot, (None,))[0] == reservation:
            del self.copying[reservation.slot]

    @rule(writer=WRITERS)
    def a_writer_dies(self, writer: str) -> None:
        self.store.writer_gone(writer)
        self.copying = {slot: claim for slot, claim in self.copying.items() if claim[1] != writer}

    @rule(seconds=st.floats(0.1, 10.0))
    def time_passes(self, seconds: float) -> None:
        self.advance(seconds)

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        stats = self.store.stats()
        assert stats.free + stats.reserved + stats.quarantined + stats.committed == stats.slots == SLOTS
        assert stats.reserved + stats.quarantined == len(self.copying)
        assert stats.leases == len(self.ends)

    @invariant()
    def what_a_lease_keeps_stays_where_it_is(self) -> None:
        for lease, places in self.keeps.items():
            for place in places:
                assert self.store.leased(lease, place.block.key) == place
        assert self.store.stats().leased_blocks == len(set().union(*self.keeps.values()))

    def teardown(self) -> None:
        """Whatever happened: once writers and leases are gone every slot can be had again."""
        self.advance(1_000.0)
        for writer in ("w", "x"):
            self.store.writer_gone(writer)
        self.store.open_lease("last", 1.0, self.now)
        wanted = [(1_000 + name).to_bytes(16, "little") for name in range(SLOTS)]
        assert len(self.store.reserve("last", "w", wanted, self.now).slots) == SLOTS


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_store = StoreMachine.TestCase
