"""Every request of a commit on S3 with every fault on the wire, one run each.

After each run the commit has happened exactly once, or it raised CommitOutcomeUnknownError and ``resolve_commit``
returns its outcome, or it failed with another typed error and never happens, even if a delayed request arrives late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests import proxy as wire
from tests.crash.wire_lake import (
    BASE_VERSION,
    NEXT_VERSION,
    SHORT_TIMEOUT_S,
    WireLake,
    assert_creates_are_conditional,
    file_kind,
    make_base,
)
from tests.proxy import Exchange, FaultyProxy, WireFault
from tests.servers.s3_server import S3Server
from trinitylake_ops.errors import CommitOutcomeUnknownError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.transaction.publish import CommitResolution

pytestmark = [pytest.mark.debian_packages, pytest.mark.usefixtures("fixed_requests")]

COMMITTED, LOST, UNDECIDED = CommitResolution.COMMITTED, CommitResolution.LOST, CommitResolution.UNDECIDED
NEXT_ROOT = root_path(NEXT_VERSION)
LATE_S = 2 * SHORT_TIMEOUT_S

Plan = Callable[[int], tuple[WireFault, ...]]


def _then_refused(fault: WireFault, k: int) -> tuple[WireFault, ...]:
    return (fault, wire.respond(k + 1, status=403, code="AccessDenied", times=None))


ON_THE_WAY: dict[str, Plan] = {
    "request dropped": lambda k: (wire.drop_request(k),),
    "answer dropped": lambda k: (wire.drop_response(k),),
    "request held back": lambda k: (wire.hold_request(k),),
    "answer late": lambda k: (wire.delay_response(k, seconds=LATE_S),),
    "head cut": lambda k: (wire.cut_head(k),),
    "body cut": lambda k: (wire.cut_body(k),),
}
OTHER_RESPONSES: dict[str, Plan] = {
    f"{status} {code or 'without a body'}{' after the effect' if is_forwarded else ''}": (
        lambda k, status=status, code=code, is_forwarded=is_forwarded: (  # type: ignore[misc]
            wire.respond(k, status=status, code=code, is_forwarded=is_forwarded),
        )
    )
    for status, named in (
        (409, "ConditionalRequestConflict"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (403, "AccessDenied"),
    )
    for code in (named, None)
    for is_forwarded in (False, True)
}
FROM_THEN_ON: dict[str, Plan] = {
    "request dropped, then refused": lambda k: _then_refused(wire.drop_request(k), k),
    "answer dropped after the effect, then refused": lambda k: _then_refused(wire.drop_response(k), k),
    "request held back, then refused": lambda k: _then_refused(wire.hold_request(k), k),
    "500 after the effect, then refused": lambda k: _then_refused(
        wire.respond(k, status=500, code="InternalError", is_forwarded=True), k
    ),
    "all answers dropped": lambda k: (wire.drop_response(k, times=None),),
    "all requests dropped": lambda k: (wire.drop_request(k, times=None),),
    "503 for ever": lambda k: (wire.respond(k, status=503, code="SlowDown", times=None),),
    "credentials expired": lambda k: (wire.respond(k, status=400, code="ExpiredToken", times=None),),
}
PLANS = {**ON_THE_WAY, **OTHER_RESPONSES, **FROM_THEN_ON}
WITH_THE_OTHER_CLIENT = (
    "answer dropped",
    "request held back",
    "head cut",
    "500 InternalError after the effect",
    "409 ConditionalRequestConflict after the effect",
    "request held back, then refused",
    "all answers dropped",
)
#: The outcomes that a normal test run covers: a lost response and a late effect.
WITH_BOTH = ("answer dropped", "request held back, then refused")
#: Faults that another fault of the test run covers, such as 500 for 503, or a lost response for a lost request.
SOAKED = (
    *(
        "503 SlowDown",
        "503 SlowDown after the effect",
        "403 AccessDenied after the effect",
        "head cut",
        "request dropped",
    ),
    *("answer late", "409 ConditionalRequestConflict after the effect", "request dropped, then refused"),
    *("500 after the effect, then refused", "all requests dropped", "503 for ever"),
)
#: Faults that hit each request in turn even in a normal test run. Other faults hit one request of each kind.
AT_EVERY_REQUEST = ("answer dropped",)


def runs() -> Iterator[object]:
    """Client, fault, and whether it hits each request of a commit in turn or one of each kind."""
    for client, names in (("s3fs", PLANS), ("obstore", WITH_THE_OTHER_CLIENT)):
        for name in names:
            # In a normal test run, tests/storage/test_s3_faults.py covers responses without a body.
            is_long = "without a body" in name or name in SOAKED or (client == "obstore" and name not in WITH_BOTH)
            marks = [pytest.mark.soak] if is_long else []
            can_be_all = client == "s3fs" and name not in FROM_THEN_ON and "without a body" not in name
            strikes_all = can_be_all and name in AT_EVERY_REQUEST
            yield pytest.param(client, name, strikes_all, marks=marks, id=f"{client}-{name}")
            if can_be_all and name not in AT_EVERY_REQUEST:
                yield pytest.param(client, name, True, marks=pytest.mark.soak, id=f"{client}-{name}-all")


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    return make_base()


@pytest.fixture
def proxy(radosgw: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(radosgw.endpoint) as running:
        yield running


@pytest.fixture
def lake(radosgw: S3Server, proxy: FaultyProxy, base: dict[str, bytes], client: str) -> Iterator[WireLake]:
    wire_lake = WireLake(radosgw, proxy, client, base)
    yield wire_lake
    radosgw.delete_all(wire_lake.root)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_commit_writes_all_kinds_of_files_conditionally(lake: WireLake) -> None:
    outcome = lake.commit()
    assert outcome.version == NEXT_VERSION
    log = lake.proxy.log
    written = Counter(file_kind(exchange) for exchange in log if exchange.method == "PUT")
    assert written.keys() == {"definition", "node", "root", "hint"}
    assert (written["root"], written["hint"]) == (1, 1)
    assert {exchange.method for exchange in log} == {"GET", "PUT"}
    assert_creates_are_conditional(log)
    lake.assert_state(is_committed=True)


@pytest.mark.parametrize(("client", "name", "strikes_all"), list(runs()))
def test_commit_with_wire_faults_at_every_request(lake: WireLake, name: str, strikes_all: bool) -> None:
    assert lake.commit().version == NEXT_VERSION
    requests = lake.proxy.log
    kinds = Counter[str]()
    if not strikes_all:
        requests = _one_of_each_kind(requests)
    if "effect" in name:  # reads have no such response
        requests = tuple(request for request in requests if request.method == "PUT")
        assert requests
    for request in requests:
        kinds[_run(lake, request, PLANS[name])] += 1
    assert kinds["committed"] > 0, "faults of the hint never fail a commit"
    if name in FROM_THEN_ON:
        assert kinds["failed"] > 0
        assert kinds["unknown"] == 1 or name in ("503 for ever", "credentials expired"), "the root's own request"
    elif "403" not in name:
        assert kinds == {"committed": len(requests)}, "a single passing fault is overcome"


def _one_of_each_kind(requests: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    return tuple({(request.method, file_kind(request)): request for request in requests}.values())


def _run(lake: WireLake, request: Exchange, plan: Plan) -> str:
    """Commit with a fault at one request, check the outcome, and return its kind."""
    outcome = lake.commit(plan(request.number))
    log = lake.proxy.log
    struck = log[request.number - 1]
    assert struck.fault is not None
    assert (struck.method, file_kind(struck)) == (request.method, file_kind(request)), "the same request as before"
    assert_creates_are_conditional(log)
    held = lake.proxy.held()
    lake.proxy.begin()
    if outcome.kind == "committed":
        assert outcome.version == NEXT_VERSION
        _release(held)
        lake.assert_state(is_committed=True)
    elif isinstance(outcome.error, CommitOutcomeUnknownError):
        _resolve(lake, outcome.error, held)
    else:
        lake.assert_state(is_committed=False)
        _release(held)
        lake.assert_state(is_committed=False)
    assert_creates_are_conditional(lake.proxy.log)
    return outcome.kind


def _release(held: tuple[Exchange, ...]) -> None:
    for exchange in held:
        exchange.released.set()
        assert exchange.done.wait(10)
        assert exchange.server_status is not None


def _resolve(lake: WireLake, error: CommitOutcomeUnknownError, held: tuple[Exchange, ...]) -> None:
    """Check that the resolved outcome is that of the server, and that a fence makes it final."""
    assert error.version == NEXT_VERSION
    is_there = NEXT_ROOT in lake.files()
    opened = lake.open()
    expected = COMMITTED if is_there else UNDECIDED
    assert opened.resolve_commit(NEXT_VERSION, error.commit_id) == expected
    if not is_there:
        assert opened.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == LOST
    _release(held)
    if held:
        assert [exchange.server_status for exchange in held] == [412]
    assert lake.open().resolve_commit(NEXT_VERSION, error.commit_id) == (COMMITTED if is_there else LOST)
    lake.assert_state(is_committed=is_there, is_fenced=not is_there)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("is_fenced", [True, False])
def test_commit_with_a_delayed_root(lake: WireLake, is_fenced: bool) -> None:
    """The case for which fences exist: the request that creates the root arrives long after its writer gave up."""
    outcome = lake.commit(
        (
            wire.hold_request(method="PUT", target_part=NEXT_ROOT),
            wire.respond(method="GET", target_part=NEXT_ROOT, at=2, status=403, code="AccessDenied", times=None),
        )
    )
    error = outcome.error
    assert isinstance(error, CommitOutcomeUnknownError)
    assert (error.version, error.path) == (NEXT_VERSION, NEXT_ROOT)
    (held,) = lake.proxy.held()
    lake.proxy.begin()
    opened = lake.open()
    assert opened.latest_version() == BASE_VERSION
    assert opened.resolve_commit(NEXT_VERSION, error.commit_id) == UNDECIDED
    if is_fenced:
        assert opened.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == LOST
    _release((held,))
    assert held.server_status == (412 if is_fenced else 200)
    for reader in (opened, lake.open()):
        assert reader.resolve_commit(NEXT_VERSION, error.commit_id) == (LOST if is_fenced else COMMITTED)
        assert reader.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == (LOST if is_fenced else COMMITTED)
        assert reader.latest_version() == NEXT_VERSION
    lake.assert_state(is_committed=not is_fenced, is_fenced=is_fenced)
    assert_creates_are_conditional(lake.proxy.log)
