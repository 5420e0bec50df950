"""How do the parts of several workers come to lie in one piece? Each worker writes its part where it belongs.

Once it is known that the batches of all workers look alike, the parent makes one more memory file, hands it to every
one of them, and from then on names slots of that file. A slot holds the batch of all workers, leaf by leaf, and in each
leaf the rows of worker 0, 1, ...: what a copy that puts the parts together would have made. So it can be lent as it is.

A worker that comes later (a replacement, or one more) makes its first batch in memory of its own; then new joint slots
are made, for those who are there now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tensordict import TensorDict

from lightning_weightsync.collectors.member import Member
from lightning_weightsync.collectors.rollouts import OWN_SLOTS, BatchReader
from lightning_weightsync.transports.memory import create_memory_file


class JointSlots:
    """Slots into which several workers write, each its part.

    Args:
        members: The workers, in the order of their parts; their batches look alike (``look_alike``).
        tell: Sends each of them a message: ``tell(index, member, kind, **fields)``.

    Attributes:
        members: The same.
        reader: The parent's end.
    """

    def __init__(self, members: Sequence[Member], tell: Callable[..., None]) -> None:
        self.members = tuple(members)
        schema = members[0].reader.schema
        assert schema is not None
        self._rows = schema.batch_size[0]
        descriptor = create_memory_file("lightning_weightsync-joint")
        try:
            self.reader = BatchReader(descriptor)
            self.reader.open(schema.joint(len(members)).to_json())
            for part, member in enumerate(members):
                tell(part, member, "joint", descriptor=descriptor, parts=len(members), part=part)
        finally:
            os.close(descriptor)

    def part(self, slot: int, member: Member) -> TensorDict:
        """One worker's part of the batch in a slot, as views that are valid until the slot is given back."""
        first = self.members.index(member) * self._rows
        part: TensorDict = self.reader.read(slot)[first : first + self._rows]
        return part


def look_alike(members: Sequence[Member]) -> bool:
    """Whether all of these have made a batch, and their batches can be parts of one."""
    first = members[0].reader.schema
    return first is not None and bool(first.batch_size) and all(m.reader.schema == first for m in members)


def is_joint(slot: int) -> bool:
    """Whether a slot's number, as requests name it, is one of joint slots."""
    return slot >= OWN_SLOTS
