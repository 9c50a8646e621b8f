"""Base of exchanges with rounding and an error-feedback residual."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from elche.comm.transport.exchange import Exchange


class ResidualExchange(Exchange):
    """A sum that is rounded; what is left out of it is a rank's committed state.

    That residual changes only when a sum has been taken (:meth:`Exchange.release`,
    :meth:`Exchange.finish`, :meth:`commit`), so a reduction that fails and is done
    again elsewhere sends the same once more.
    """

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """What this rank has sent, without what the transport adds."""

    @property
    @abstractmethod
    def remote_bytes(self) -> int:
        """Of :attr:`sent_bytes`, those to other hosts; all if hosts are not known."""

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Host memory beside contributions and results: residual and what travels."""

    @abstractmethod
    def commit(self) -> None:
        """Every rank adopts the sum: what it left out of this rank's message is kept.

        That also holds for a rank on which it failed while another one had the result
        and all adopt that. A second call for the same message does nothing.

        Raises:
            ProtocolError: nothing was begun, or no rank can have the sum because this
                one has not sent its part of it.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Nobody adopts what was begun: the residual stays what it was before.

        A sum that had arrived is forgotten; a message still under way breaks the
        exchange, because others may be sending to it.
        """

    @abstractmethod
    def flush(self, what: str) -> None:
        """Waits until all that was sent has left, and holds none of it any more.

        Before the group is closed, or another exchange takes this one's place in it.

        Raises:
            CommunicationError: it failed.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The residual as last committed, a copy, and what it belongs to."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from another exchange's residual, of any codec and world size.

        What was left out of a mean becomes part of this rank's message, and the other
        way round where this rank owns other elements now; exact for equal weights.

        Raises:
            MismatchError: it is the residual of other elements.
            ProtocolError: a message is under way.
        """

    def retire(self) -> None:
        """Leaves what there is still to do to the thread that asks for it.

        Its group is left, or another exchange goes on in its place.
        """
