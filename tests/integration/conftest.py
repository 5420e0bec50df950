from collections.abc import Callable, Iterator

import pytest

from lightning_weightsync.transports import process_group
from tests.helpers.holdings import holdings, leftovers
from tests.helpers.processes import nothing_left
from tests.helpers.receivers import ReceiverPool
from tests.helpers.schemes import Connector


@pytest.fixture
def no_leftovers(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[int]]]:
    """Lists the processes that the test has started; fails a test that leaves any of them, or anything else."""
    with nothing_left(capfd) as processes:
        yield processes


@pytest.fixture(scope="session")
def receiver_pool() -> Iterator[ReceiverPool]:
    pool = ReceiverPool(3)
    yield pool
    pool.close()


@pytest.fixture
def five(receiver_pool: ReceiverPool) -> None:
    """Two processes more than usual; to be asked for before what looks at what is left."""
    receiver_pool.grow(5)


@pytest.fixture
def receivers(receiver_pool: ReceiverPool) -> Iterator[ReceiverPool]:
    """Three receiver processes. Fails a test that leaves anything open, in them or here."""
    before = holdings()
    yield receiver_pool
    complaints = receiver_pool.clean()
    here = leftovers(before)
    receiver_pool.renew()
    assert not complaints, complaints
    assert not here, f"the test's own process still holds {here}"


@pytest.fixture(params=["shared_memory", "network"])
def connect(
    receivers: ReceiverPool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connector]:
    """Makes connected schemes: the sender here, the receivers in processes of their own. Shuts the senders down.

    Each test runs over both transports, unless it says otherwise (``over_network``, ``over_shared_memory``). However
    small a model is, it travels over the pair group (``test_scheme_inline`` has those that do not).
    """
    monkeypatch.setattr(process_group, "INLINE", 0)
    connector = Connector(receivers, request.param)
    yield connector
    connector.close()
