"""The fixtures of the simulated device."""

from tests.simulated import device, make_device

__all__ = ["device", "make_device"]
