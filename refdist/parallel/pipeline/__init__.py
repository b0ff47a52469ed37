"""Pipeline parallelism: schedules as data, made, checked, timed, drawn, and executed by one executor.

    schedules/        one short file a schedule: (stages, micro-batches, chunks) -> actions of each stage
    action.py         the words: Action, Schedule, where chunks of the model lie
    catalog.py        the schedules by name, and what their papers promise
    communication.py  one pass adds sends and receives to any schedule
    check.py          whether a schedule is right, and if not, where it is wrong
    timing.py         how long it takes, bubble, micro-batches in flight
"""

from refdist.parallel.pipeline.action import Action, Place, Schedule, read_schedule
from refdist.parallel.pipeline.catalog import SCHEDULES, make_schedule, promise
from refdist.parallel.pipeline.check import Fault, check, require_valid
from refdist.parallel.pipeline.communication import Message, add_communication
from refdist.parallel.pipeline.timing import Times, bubble, makespan, peak_in_flight, simulate

__all__ = ["SCHEDULES", "Action", "Fault", "Message", "Place", "Schedule", "Times", "add_communication", "bubble", "check",
           "make_schedule", "makespan", "peak_in_flight", "promise", "read_schedule", "require_valid", "simulate"]
