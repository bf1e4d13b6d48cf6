"""Ways round faults of megatron-core 0.19 that a run without Apex or Transformer Engine would hit."""

import ctypes
import functools
import importlib.util
import multiprocessing
import os
import signal
from multiprocessing.managers import SyncManager

import torch

from megatron_prores.errors import UserError


def install() -> None:
    """Apply them; a second call does nothing."""
    _use_compiled_dataset_helpers()
    _let_distributed_optimizer_load()
    _keep_checkpoint_helper_with_its_run()
    _miss_a_tokenizer_at_once()


def _use_compiled_dataset_helpers() -> None:
    """Megatron runs make for its dataset helpers at every start, and exits in a wheel install, which ships them."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def _let_distributed_optimizer_load() -> None:
    """Loading a checkpoint into the distributed optimizer goes wrong with torch's AdamW, in four ways.

    Its `state_dict()` wants a step, which no fresh optimizer has: fill the state first, with Megatron's own dummy
    values, every one of which loading replaces. In fp32 the main parameters are the model's and are copied into
    while autograd watches: load without it. The step is saved with the parameter groups, but then overwritten by
    the parameters' states, which have none or the dummy one: leave it alone. And all parameters get one step tensor
    to share, which each of them then advances: give every parameter its own.
    """
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(optimizer_class.sharded_state_dict, "__wrapped__"):
        return
    sharded_state_dict = optimizer_class.sharded_state_dict
    load_state_dict = optimizer_class.load_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

    @functools.wraps(sharded_state_dict)
    def with_a_state(self, model_sharded_state_dict, is_loading=False, *args, **kwargs):
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    @functools.wraps(set_states)
    def without_step(self, model_param, tensors):
        set_states(self, model_param, {**tensors, "step": None})

    @functools.wraps(load_state_dict)
    @torch.no_grad()
    def with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer_class.sharded_state_dict = with_a_state
    optimizer_class._set_main_param_and_optimizer_states = without_step
    optimizer_class.load_state_dict = with_own_steps


def _as_helper() -> None:
    """In the process that holds the queue of a checkpoint's writers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the run


def _keep_checkpoint_helper_with_its_run() -> None:
    """Megatron's first save starts a process that outlives a killed run, and that dies of the SIGTERM that torchrun
    sends to the whole group, so that --exit-signal-handler could not save.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    @functools.cache
    def get_write_results_queue(mp_mode: str = "spawn"):
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
        manager.start(_as_helper)
        return manager.Queue()

    filesystem_async.get_write_results_queue = get_write_results_queue


def _miss_a_tokenizer_at_once() -> None:
    """A folder that is not there may be a name on the Hugging Face hub, and without a network that takes a minute."""
    from megatron.training import global_vars

    build_tokenizer = global_vars.build_tokenizer
    if hasattr(build_tokenizer, "__wrapped__"):
        return

    @functools.wraps(build_tokenizer)
    def with_a_look(args, *rest, **kwargs):
        name = args.tokenizer_model or ""
        above = os.path.dirname(name)
        if args.tokenizer_type == "HuggingFaceTokenizer" and os.path.isdir(above) and not os.path.exists(name):
            where = f"there is none in {above} (for a Hugging Face name start where there is no folder {above})"
            raise UserError(f"--tokenizer-model {name}: {where}")
        return build_tokenizer(args, *rest, **kwargs)

    global_vars.build_tokenizer = with_a_look
