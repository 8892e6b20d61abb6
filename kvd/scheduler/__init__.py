"""Runs requests: a pure queue, turns and jobs as generators, one engine thread, and the service in front of it.

`agents` holds agents, branches and what their logs lack, `core` the engine's parts and the operations on agents,
`engine` the thread and its inbox, `errors` the service's errors, `jobs` the control operations, `memory` carries out
the pager's instructions, `params` checks RPC parameters, `registry` finds agents, `requests` is what goes in and out,
`sampling` chooses tokens, `service` the RPC methods, `state` the pure scheduler, `stopping` stop strings, `store_door`
the way to the swap thread, `turn` one turn from matching to commit, `views` what clients may see.

May import kvd.errors, kvd.ids, kvd.vm, kvd.store, kvd.quant, kvd.model, kvd.attention (types), kvd.ops.footprint.
"""

from kvd.scheduler.requests import AgentRef, JobRequest, TurnRequest, TurnResult
from kvd.scheduler.sampling import SamplingParams
from kvd.scheduler.state import Scheduler

__all__ = ["AgentRef", "JobRequest", "SamplingParams", "Scheduler", "TurnRequest", "TurnResult"]
