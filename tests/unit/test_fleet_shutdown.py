"""A fleet ends its links before its schemes: what waits in a channel may be a descriptor of a scheme's slot."""

from unittest.mock import MagicMock

from lightning_weightsync.collectors.fleet import Fleet


def test_links_are_closed_before_the_slots_whose_descriptors_may_wait_in_them():
    fleet = MagicMock(_order=b"", _workers=[], schemes={"policy": MagicMock()})
    order = MagicMock()
    order.attach_mock(fleet.hub.close, "links")
    order.attach_mock(fleet.schemes["policy"].shutdown, "slots")
    Fleet.shutdown(fleet, 0.0)
    assert [name for name, _, _ in order.mock_calls] == ["links", "slots"]
