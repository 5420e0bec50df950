"""What a sender does with its links, while other threads change which there are."""

import pytest

from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import LinkState
from tests.helpers.threads import soon


@pytest.fixture
def hub():
    hub = LinkHub(2)
    yield hub
    hub.close()


def test_a_worker_may_be_admitted_or_leave_while_others_are_asked(hub):
    class Leaving:
        worker_idx, pid, name, cause = 0, 1, "worker 0 (pid 1)", None

        @property
        def state(self):
            hub.links.pop(0, None)
            hub.links[1] = Leaving()
            return LinkState.CLOSED

        def end(self):
            pass

    hub.links[0] = Leaving()
    answers = hub.ask(hub.links.values(), lambda link: None, {"digested"}, phase="digest", deadline=soon())
    assert list(answers.failed) == [0]
