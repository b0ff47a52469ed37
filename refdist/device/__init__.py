"""The emulated GPU of one rank: its memory, its kernels, its counters and events."""

from refdist.device.device import CATEGORIES, Device, Traffic
from refdist.device.ledger import Timeline
from refdist.device.overlap import Overlap
from refdist.device.recording import Recording

__all__ = ["CATEGORIES", "Device", "Overlap", "Recording", "Timeline", "Traffic"]
