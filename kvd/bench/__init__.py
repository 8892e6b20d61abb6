"""Every figure the README quotes, reproducible: real daemons, real models, the client's clock.

`attention` measures prefill and decode speed, `attention_gpu` kernels on a GPU and `gpu_model` a whole model there,
`capacity` counts bytes of agents and agents in a budget, `cli` is the command group, `eviction` compares eviction
policies (`eviction_workloads` makes traces, `eviction_replay` plays them, `eviction_speed` times the pager), `harness`
starts and kills daemons, `machine` measures what the machine can do at most, `ppl` measures page formats, `reference`
runs mlx-lm by itself, `rpc` measures what the protocol costs (`rpc_gateway`, `rpc_peers` are its other ends), `serve`
measures several agents of one daemon (`serve_runs` and `serve_swap` run them, each a process of `serve_client`;
`serve_figures` computes; `serve_reference` is mlx-lm's batched generation), `swap` measures swapping beside plain files
(`swap_rig` is the daemon's path without a model), `text` gives technical English, `ttft` measures time to first token,
`fork` branching.

`startup` starts daemons on a data folder that `many_agents` made.

`soak` is the command that runs a daemon under many clients which behave at random: `soak_client` is one of them,
`soak_transcript` what it was told, `soak_verify` holds the daemon to that, `soak_run` starts, kills and replaces
processes, `soak_watch` judges growth, `soak_check` what is left at the end.

May import anything of kvd and kvd_client; nothing of kvd imports it but the command line and the demo.
"""

from kvd.bench.text import technical_english

__all__ = ["technical_english"]
