"""The nixl channel: the suite over UCX's TCP, both agents in one process."""

import pytest

from pdxfer.testing.channel_suite import ChannelSuite
from pdxfer.transport.base import EndpointFactory

pytest.importorskip("nixl_cu12", reason="the nixl wheel is not installed")

from pdxfer.transport.nixl import NixlEndpoint

pytestmark = pytest.mark.nixl


class TestNixlChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return NixlEndpoint
