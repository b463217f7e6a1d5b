"""A commit on S3 with each fault on the wire at each of its requests.

Each time the commit succeeds exactly once, raises CommitOutcomeUnknownError and ``resolve_commit`` returns its outcome,
or fails with another typed error and never takes effect, even if a delayed request arrives later.
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
DELAY_S = 2 * SHORT_TIMEOUT_S

FaultPlan = Callable[[int], tuple[WireFault, ...]]


def _then_rejected(fault: WireFault, k: int) -> tuple[WireFault, ...]:
    return (fault, wire.respond(k + 1, status=403, code="AccessDenied", times=None))


NETWORK_FAULTS: dict[str, FaultPlan] = {
    "request dropped": lambda k: (wire.drop_request(k),),
    "response dropped": lambda k: (wire.drop_response(k),),
    "request delayed": lambda k: (wire.hold_request(k),),
    "response delayed": lambda k: (wire.delay_response(k, seconds=DELAY_S),),
    "head truncated": lambda k: (wire.cut_head(k),),
    "body truncated": lambda k: (wire.cut_body(k),),
}
ERROR_RESPONSES: dict[str, FaultPlan] = {
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
LASTING_FAULTS: dict[str, FaultPlan] = {
    "request dropped, then rejected": lambda k: _then_rejected(wire.drop_request(k), k),
    "response dropped, then rejected": lambda k: _then_rejected(wire.drop_response(k), k),
    "request delayed, then rejected": lambda k: _then_rejected(wire.hold_request(k), k),
    "500 after the effect, then rejected": lambda k: _then_rejected(
        wire.respond(k, status=500, code="InternalError", is_forwarded=True), k
    ),
    "all responses dropped": lambda k: (wire.drop_response(k, times=None),),
    "all requests dropped": lambda k: (wire.drop_request(k, times=None),),
    "503 indefinitely": lambda k: (wire.respond(k, status=503, code="SlowDown", times=None),),
    "credentials expired": lambda k: (wire.respond(k, status=400, code="ExpiredToken", times=None),),
}
PLANS = {**NETWORK_FAULTS, **ERROR_RESPONSES, **LASTING_FAULTS}
OBSTORE_PLANS = (
    "response dropped",
    "request delayed",
    "head truncated",
    "500 InternalError after the effect",
    "409 ConditionalRequestConflict after the effect",
    "request delayed, then rejected",
    "all responses dropped",
)
#: The plans that a normal test run covers with obstore: a lost response and a delayed effect.
REGULAR_OBSTORE_PLANS = ("response dropped", "request delayed, then rejected")
#: Faults that resemble another fault of a normal test run: 503 resembles 500, and a lost request a lost response.
#: tests/storage/test_s3_faults.py tests each error response of a single request.
SOAK_PLANS = (
    *(
        "503 SlowDown",
        "503 SlowDown after the effect",
        "403 AccessDenied",
        "403 AccessDenied after the effect",
        "409 ConditionalRequestConflict",
        "body truncated",
        "head truncated",
        "request dropped",
    ),
    *("response delayed", "409 ConditionalRequestConflict after the effect", "request dropped, then rejected"),
    *("500 after the effect, then rejected", "all requests dropped", "503 indefinitely"),
)
#: Faults that occur at each request in turn even in a normal test run. Others occur at one request of each kind.
REGULAR_PLANS_FOR_ALL_REQUESTS = ("response dropped",)


def runs() -> Iterator[object]:
    """Yield clients and faults, and whether a fault occurs at each request of a commit or at one of each kind."""
    for client, names in (("s3fs", PLANS), ("obstore", OBSTORE_PLANS)):
        for name in names:
            # In a normal test run, tests/storage/test_s3_faults.py covers responses without a body.
            is_for_soak = (
                "without a body" in name
                or name in SOAK_PLANS
                or (client == "obstore" and name not in REGULAR_OBSTORE_PLANS)
            )
            marks = [pytest.mark.soak] if is_for_soak else []
            may_hit_all = client == "s3fs" and name not in LASTING_FAULTS and "without a body" not in name
            hits_all = may_hit_all and name in REGULAR_PLANS_FOR_ALL_REQUESTS
            yield pytest.param(client, name, hits_all, marks=marks, id=f"{client}-{name}")
            if may_hit_all and name not in REGULAR_PLANS_FOR_ALL_REQUESTS:
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


@pytest.mark.parametrize(("client", "name", "hits_all"), list(runs()))
def test_commit_with_wire_faults_at_every_request(lake: WireLake, name: str, hits_all: bool) -> None:
    assert lake.commit().version == NEXT_VERSION
    requests = lake.proxy.log
    outcomes = Counter[str]()
    if not hits_all:
        requests = _one_of_each_kind(requests)
    if "effect" in name:  # reads have no such response
        requests = tuple(request for request in requests if request.method == "PUT")
        assert requests
    for request in requests:
        outcomes[_run(lake, request, PLANS[name])] += 1
    assert outcomes["committed"] > 0, "a fault at the hint never fails a commit"
    if name in LASTING_FAULTS:
        assert outcomes["failed"] > 0
        assert outcomes["unknown"] == 1 or name in ("503 indefinitely", "credentials expired"), (
            "the request for the root"
        )
    elif "403" not in name:
        assert outcomes == {"committed": len(requests)}, "a single transient fault is retried"


def _one_of_each_kind(requests: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    return tuple({(request.method, file_kind(request)): request for request in requests}.values())


def _run(lake: WireLake, request: Exchange, plan: FaultPlan) -> str:
    """Commit with a fault at one request, check the outcome, and return its kind."""
    outcome = lake.commit(plan(request.number))
    log = lake.proxy.log
    faulted = log[request.number - 1]
    assert faulted.fault is not None
    assert (faulted.method, file_kind(faulted)) == (request.method, file_kind(request)), (
        "the fault occurred at this request"
    )
    assert_creates_are_conditional(log)
    delayed = lake.proxy.held()
    lake.proxy.begin()
    if outcome.kind == "committed":
        assert outcome.version == NEXT_VERSION
        _release(delayed)
        lake.assert_state(is_committed=True)
    elif isinstance(outcome.error, CommitOutcomeUnknownError):
        _resolve(lake, outcome.error, delayed)
    else:
        lake.assert_state(is_committed=False)
        _release(delayed)
        lake.assert_state(is_committed=False)
    assert_creates_are_conditional(lake.proxy.log)
    return outcome.kind


def _release(delayed: tuple[Exchange, ...]) -> None:
    for exchange in delayed:
        exchange.released.set()
        assert exchange.done.wait(10)
        assert exchange.server_status is not None


def _resolve(lake: WireLake, error: CommitOutcomeUnknownError, delayed: tuple[Exchange, ...]) -> None:
    """Check that the resolved outcome matches the server, and that a fence makes it final."""
    assert error.version == NEXT_VERSION
    was_created = NEXT_ROOT in lake.files()
    opened = lake.open()
    expected = COMMITTED if was_created else UNDECIDED
    assert opened.resolve_commit(NEXT_VERSION, error.commit_id) == expected
    if not was_created:
        assert opened.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == LOST
    _release(delayed)
    if delayed:
        assert [exchange.server_status for exchange in delayed] == [412]
    assert lake.open().resolve_commit(NEXT_VERSION, error.commit_id) == (COMMITTED if was_created else LOST)
    lake.assert_state(is_committed=was_created, is_fenced=not was_created)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("is_fenced", [True, False])
def test_delayed_root_is_resolved(lake: WireLake, is_fenced: bool) -> None:
    """The request that creates the root arrives long after its writer has given up, the case that needs fences."""
    outcome = lake.commit(
        (
            wire.hold_request(method="PUT", target_part=NEXT_ROOT),
            wire.respond(method="GET", target_part=NEXT_ROOT, at=2, status=403, code="AccessDenied", times=None),
        )
    )
    error = outcome.error
    assert isinstance(error, CommitOutcomeUnknownError)
    assert (error.version, error.path) == (NEXT_VERSION, NEXT_ROOT)
    (delayed,) = lake.proxy.held()
    lake.proxy.begin()
    opened = lake.open()
    assert opened.latest_version() == BASE_VERSION
    assert opened.resolve_commit(NEXT_VERSION, error.commit_id) == UNDECIDED
    if is_fenced:
        assert opened.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == LOST
    _release((delayed,))
    assert delayed.server_status == (412 if is_fenced else 200)
    for reader in (opened, lake.open()):
        assert reader.resolve_commit(NEXT_VERSION, error.commit_id) == (LOST if is_fenced else COMMITTED)
        assert reader.resolve_commit(NEXT_VERSION, error.commit_id, fence=True) == (LOST if is_fenced else COMMITTED)
        assert reader.latest_version() == NEXT_VERSION
    lake.assert_state(is_committed=not is_fenced, is_fenced=is_fenced)
    assert_creates_are_conditional(lake.proxy.log)
