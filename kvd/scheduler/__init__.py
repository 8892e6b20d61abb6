"""Runs requests: a pure queue, turns and jobs as generators, one engine thread, and the service in front of it.

- `admission` refuses what can never fit
- `agents` holds agents, branches and what their logs lack; `registry` finds agents
- `answering`: requests from arrival to answer; `places` tells those that wait where they stand
- `batch_size`: the default of `--max-batch`
- `branches` says how many branches an agent keeps
- `chat`: a chat call between its parameters (`chat_params`) and its turn; `history` its prompt with answers as written
- `commit` makes changes durable
- `core` holds the engine's parts and cuts and forks branches; `engine` is the thread
- `disk_health` tells how the disk fares
- `disk_quotas`: what namespaces have on disk, and may have
- `endings` deletes agents whose time is over
- `errors`: the service's errors
- `exporting` and `importing` move an agent to a file and back in steps of `file_steps`
- `forking` makes a fork durable while its memory is made
- `generation` computes and samples; `logprobs` tells clients what tokens were likely
- `governor` limits what is written by the minute
- `inbox` shares the engine's time between requests and look-ups
- `injected`: what an injection answers
- `iterations` chooses what the model computes next
- `jobs`: the control operations
- `journal` tells what happens, `event_ring` remembers the last of it, `subscribing` sends it to whoever subscribed
- `limits` changes limits of memory at run time
- `memory` carries out the pager's instructions
- `messages`: what reaches the engine
- `monitoring` tells where all pages are, again only where that changed
- `paging` has pages loaded ahead for whom `prediction` expects, and feeds `thrashing`, which slows admission down
- `params` checks RPC parameters (`plain_values`: of what JSON can hold)
- `planning` decides what a turn will do before anything changes; `resuming` lets broken streams go on
- `pressure` refuses work when the machine's memory is short
- `requests`: what goes in and out
- `residence`: what a turn holds and gives back when preempted
- `reserving` says who may be in RAM at once
- `restore` brings recovered agents back
- `sampling` chooses tokens; `stopping`: stop strings
- `service` has the RPC methods
- `sharing` finds pages of the namespace and who is about to make them
- `shedding`: whose page files go when the quota is full; `sleepers` knows who maps them
- `state`: the pure scheduler
- `steps` runs the model for all who wait for it
- `store_door`: the way to the swap thread
- `tokenizing` counts tokens
- `tracing` writes down what agents do to pages
- `turn`: one turn from matching to commit
- `upkeep`: what the engine does for itself
- `verifying` has bad page files written anew from RAM
- `views`: what clients may see
- `waiting`: how requests wait
- `waking` reads agents that sleep
- `warm` has the folders of exported agents

May import kvd.errors, kvd.ids, kvd.vm, kvd.store, kvd.quant, kvd.model, kvd.attention (types), kvd.ops.
"""

from kvd.scheduler.requests import AgentRef, JobRequest, TurnRequest, TurnResult
from kvd.scheduler.sampling import SamplingParams
from kvd.scheduler.state import Scheduler

__all__ = ["AgentRef", "JobRequest", "SamplingParams", "Scheduler", "TurnRequest", "TurnResult"]
