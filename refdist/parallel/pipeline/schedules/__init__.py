"""The schedules: one short pure function a file, from (stages, micro-batches, chunks) to the actions of each stage."""

from refdist.parallel.pipeline.schedules.dualpipe import dualpipe
from refdist.parallel.pipeline.schedules.dualpipe_v import dualpipe_v
from refdist.parallel.pipeline.schedules.gpipe import gpipe
from refdist.parallel.pipeline.schedules.interleaved import interleaved
from refdist.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from refdist.parallel.pipeline.schedules.zb_h1 import zb_h1
from refdist.parallel.pipeline.schedules.zb_h2 import zb_h2
from refdist.parallel.pipeline.schedules.zb_v import zb_v

__all__ = ["dualpipe", "dualpipe_v", "gpipe", "interleaved", "one_f_one_b", "zb_h1", "zb_h2", "zb_v"]
