"""Every patch is in one list, the documentation shows it, and the installed versions still need each of them."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dapo.checkpoints import policy_state
from megatron_dapo.policy import policy as policy_module
from megatron_dapo.policy.megatron import patches
from megatron_dapo.policy.megatron.optimizer_state import initialize_state
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.model import gpt
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks
from megatron_dapo.selfcheck.cases import LayoutSpec, selfcheck_config
from megatron_dapo.selfcheck.synthetic import random_hf_weights, synthetic_shape

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "megatron_dapo"
NOT_NEEDED = """
import gc, warnings
gc.disable()  # a sixth of the time of these imports
warnings.simplefilter("ignore")
import megatron.core
from packaging.version import Version
from megatron_dapo.policy.megatron.patches import PATCHES
for patch in PATCHES:
    fixed = patch.fixed_in and Version(megatron.core.__version__).release[:2] >= Version(patch.fixed_in).release
    if not fixed and not patch.needed():
        print(patch.target)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="most patches are for machines without CUDA")
def test_the_installed_versions_need_every_patch():
    """In a new process, which has none of them."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", NOT_NEEDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout, f"megatron-core no longer needs these patches:\n{done.stdout}"


def on_cuda(rendezvous):
    patches.install()
    theirs = patches.layers.torch  # as one of Megatron's modules sees it
    one = torch.ones(2, device="cpu")
    made = [
        theirs.arange(2, device="cuda"), theirs.eye(2, device="cuda:0"), theirs.as_tensor([1], device="cuda"),
        theirs.zeros_like(one, device="cuda", pin_memory=True), theirs.tensor(1.0, device=torch.device("cuda", 0)),
        one.to(torch.cuda.current_device()), one.cuda(), torch.nn.Linear(1, 1).cuda().weight,
    ]  # fmt: skip
    with torch.device("meta"):
        meta = [torch.empty(1), theirs.empty(1)]
    untouched = not any(inspect.isfunction(function) for function in (torch.ones, torch.zeros_like, torch.Tensor.to))
    return [tensor.device.type for tensor in made], [tensor.device.type for tensor in meta], untouched


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the device is a GPU")
def test_without_cuda_its_device_is_the_cpu():
    devices, meta, untouched = run_ranks(1, on_cuda)[0]
    assert set(devices) == {"cpu"} and set(meta) == {"meta"} and untouched


def test_the_documentation_shows_the_list():
    lines = []
    for patch in patches.PATCHES:
        report = f"[report]({patch.upstream})" if patch.upstream else ""
        versions = f"before {patch.fixed_in}" if patch.fixed_in else ""
        lines.append(f"| {patch.target} | {patch.reason} | {patch.when} | {versions} | {report} |")
        if patch.upstream and "//" not in patch.upstream:
            assert (ROOT / "docs" / patch.upstream).is_file()
    table = "\n".join(lines)
    page = (ROOT / "docs/megatron.md").read_text()
    assert table in page, f"docs/megatron.md should have\n{table}"
    in_servers = [line for line in page.splitlines() if line.startswith("| SGLang") and "| server |" in line]
    assert all(any(folder.rstrip("/") in line for line in in_servers) for folder in IN_SERVER)


# ---- nothing else patches ----

OTHERS = ("megatron", "torch", "sglang", "transformers", "multiprocessing")
PATCHING = ("policy/megatron/patches.py", "policy/megatron/cpu.py", "policy/megatron/importing.py")
IN_SERVER = ("engines/sglang/cpu_stubs/", "engines/sglang/in_server/")
# A setting of torch, and the entry of a process group of ours.
ALLOWED = {"torch.utils.deterministic.fill_uninitialized_memory", "dist.distributed_c10d._world.pg_group_ranks"}
METHODS = {name for name in vars(DistributedOptimizer) if callable(getattr(DistributedOptimizer, name))}
METHODS |= {"get_grad_norm", "model_param_group_index_map", "load_weights", "set_start_method"}


def assigned(tree):
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Subscript):
                    part = part.value
                if isinstance(part, ast.Attribute):
                    yield ast.unparse(part)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1]).strip(chr(39))}"


def replaced(source):
    """Attributes of other packages' modules and classes, and methods of other objects than self, that it assigns."""
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        names = getattr(node, "names", []) if isinstance(node, ast.Import | ast.ImportFrom) else []
        for alias in names:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
            if module.split(".")[0] in OTHERS:
                imported.add((alias.asname or alias.name).split(".")[0])
    targets = set(assigned(tree))
    found = {target for target in targets if target.split(".")[0] in imported}
    found |= {t for t in targets if t.rpartition(".")[2] in METHODS and not t.startswith("self.")}
    return found - ALLOWED


def test_no_other_file_patches():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name not in PATCHING and not name.startswith(IN_SERVER) and (targets := replaced(path.read_text())):
            found[name] = targets
    assert not found, f"put these patches into policy/megatron/patches.py: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.current_device = None",
        "from megatron.core import jit as j\nj.jit_fuser = None",
        "from megatron.core.optimizer import DistributedOptimizer\nsetattr(DistributedOptimizer, 'step', None)",
        "optimizer.get_grad_norm = None",
        "optimizer.model_param_group_index_map[parameter] = None",
        "def f():\n    import torch.distributed as dist\n    a, dist.all_reduce = None, None",
    ],
)
def test_the_check_finds(source):
    assert replaced(source)


# ---- the two bugs of Megatron that docs/upstream reports ----


def wrong_places(optimizer):
    """Parameters whose noted place has the state of another parameter."""
    count = 0
    for part in optimizer.chained_optimizers:
        for parameter, (group, place) in part.model_param_group_index_map.items():
            shard = part.optimizer.param_groups[group]["params"][place]
            piece = part._get_model_param_range_map(parameter)["param"]
            count += not torch.equal(shard.float(), parameter.detach().view(-1)[piece.start : piece.end].float())
    return count


def places(rendezvous):
    policy_module.patch_optimizer = lambda optimizer: None
    config = selfcheck_config(LayoutSpec.parse("do"), policy={"precision": "bf16"})
    shape = synthetic_shape("hybrid")
    policy = Policy(config, shape, initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(shape))
    before = wrong_places(policy.optimizer)
    patches.patch_optimizer(policy.optimizer)
    return before, wrong_places(policy.optimizer)


def test_megatron_notes_the_places_of_parameters_before_it_moves_them():
    ((before, after),) = run_ranks(1, places)
    assert before > 0 and after == 0


def saved_wrongly(policy):
    """Parameters of which the optimizer's description has other values than the (fp32) model."""
    state = policy_state._sharded_state(policy, is_loading=False)["optimizer"]["param_state"]
    (part,) = policy.optimizer.chained_optimizers
    parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    return sum(not torch.equal(state[i]["param"].data, parameters[i].detach()) for i in state)


def padding(rendezvous):
    gpt.check_hardware = lambda policy, te: None  # buckets are for overlapped communication, which needs CUDA
    options = {"overlap_grad_reduce": True, "overlap_param_gather": False, "megatron": {"ddp": {"bucket_size": 3000}}}
    config = selfcheck_config(LayoutSpec.parse("dp2do"), policy=options)
    policy = Policy(config, synthetic_shape("dense"), initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(random_hf_weights(policy.shape))
    initialize_state(policy.optimizer)
    (part,) = policy.optimizer.chained_optimizers
    assert len(part.buffers[0].buckets) > 1
    ours = saved_wrongly(policy)
    del part.sharded_param_state_fully_reshardable
    return ours, saved_wrongly(policy)


def test_megatron_saves_parameters_of_later_buckets_wrongly():
    for ours, megatrons in run_ranks(2, padding):
        assert ours == 0 and megatrons > 0
