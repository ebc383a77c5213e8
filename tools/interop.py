"""Megatron's own classes load our checkpoints, and we read what they save: a table of models and versions.

    python tools/interop.py                                          # the installed megatron-core
    python tools/interop.py --versions 0.16.1 0.17.1 0.18.2 0.19.2 --python python3.12
    SLIME=checkout python tools/interop.py                           # slime's exporter as a third opinion

Each version's wheel is downloaded and unpacked into --folder; PYTHON needs our dependencies, from 0.17 on also triton.
"in": `GPTModel` with Megatron's local layers, built with random weights at the layout of the case, loads our conversion
with `dist_checkpointing.load`; no key that it asks for may be missing, and what it leaves must be Transformer Engine's.
"out": the same ranks save with `dist_checkpointing.save`; our export of it must equal the HF model bit for bit.
"slime": its `convert_torch_dist_to_hf.py` exports our conversion, which must equal it, too.
"hybrid", from 0.19 on: `HybridModel`, the successor of `GPTModel`, loads it, and every parameter is compared.
Exit code 1: a cell says FAILED.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TP2, PP2, EP2, VPP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}, {"virtual_pipeline": 2}
CASES: dict[str, tuple[str, int, dict[str, int]]] = {
    "qwen2": ("qwen2", 1, {}),
    "qwen2 tp2 pp2 vpp2": ("qwen2", 4, TP2 | PP2 | VPP2),
    "qwen2 tied pp2": ("qwen2-tied", 2, PP2),
    "qwen2 pp2, first stage of 1 layer": ("qwen2", 2, PP2 | {"first_stage_layers": 1}),
    "qwen3 tied tp2": ("qwen3", 2, TP2),
    "llama tied tp2 pp2": ("llama", 4, TP2 | PP2),
    "mistral tp2": ("mistral", 2, TP2),
    "qwen3-moe": ("qwen3-moe", 1, {}),
    "qwen3-moe ep2": ("qwen3-moe", 2, EP2),
    "qwen3-moe pp2 ep2": ("qwen3-moe", 4, PP2 | EP2),
    "qwen3-moe ep4": ("qwen3-moe", 4, {"expert_parallel": 4}),
    "qwen2-moe ep2, shared expert": ("qwen2-moe", 2, EP2),
    "mixed-moe pp2, dense and MoE layers": ("mixed-moe", 2, PP2),
    "mixed-moe pp2 vpp2 ep2": ("mixed-moe", 4, PP2 | VPP2 | EP2),
}
# What local layers leave in a checkpoint: objects and a name of a norm that Transformer Engine has.
LEFT = ("_extra_state", "pre_mlp_layernorm.weight")


# ---- in a process with one version of megatron-core ----


def load_and_save(rendezvous: Any, folder: Path, converted: Path, saved: Path, options: dict[str, int]) -> list[str]:
    """On each rank. Returns the keys of the checkpoint that the model did not ask for."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_dapo.config import ModelShape, parse_config
    from megatron_dapo.policy.megatron.options import transformer_config
    from megatron_dapo.policy.megatron.runtime import initialize

    settings = {"precision": "fp32", "timeout_seconds": 60, "sequence_parallel": False}
    policy = parse_config({"policy": settings | options}).policy
    shape, runtime = ModelShape.from_dir(folder), initialize(policy, rendezvous=rendezvous)
    config = transformer_config(shape, policy)
    state = {}
    for stage in range(policy.virtual_pipeline):
        chunk = stage if policy.virtual_pipeline > 1 else None
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk),
            vocab_size=-(-shape.vocab // policy.tensor_parallel) * policy.tensor_parallel,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=runtime.groups,
            vp_stage=chunk,
        )
        state[f"model{stage}"] = model, model.sharded_state_dict()
    wanted = {name: sharded for name, (_, sharded) in state.items()}
    loaded, missing, unexpected = dist_checkpointing.load(wanted, str(converted / "release"), strict="return_all")
    if unexpected:
        raise ValueError(f"not in our checkpoint: {sorted(unexpected)[:3]}")
    for name, (model, _) in state.items():
        model.load_state_dict(loaded[name], strict=True)
    filesystem_async._results_queue = queue.Queue()  # Megatron would start a manager process per rank
    dist_checkpointing.save({name: model.sharded_state_dict() for name, (model, _) in state.items()}, str(saved))
    return sorted(missing)


def load_in_hybrid(rendezvous: Any, folder: Path, converted: Path) -> str:
    """HybridModel, in one process. It has twice as many layers: attention and MLP are layers of their own."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_dapo.config import ModelShape, parse_config
    from megatron_dapo.policy.megatron.options import transformer_config
    from megatron_dapo.policy.megatron.runtime import initialize
    from megatron_dapo.weights.formats.readers import HFReader
    from megatron_dapo.weights.mapping import parameter_mappings
    from megatron_dapo.weights.model_weights import megatron_tensor

    policy = parse_config({"policy": {"precision": "fp32", "timeout_seconds": 60}}).policy
    shape, runtime = ModelShape.from_dir(folder), initialize(policy, rendezvous=rendezvous)
    config = transformer_config(shape, policy)
    config.num_layers = 2 * shape.layers
    hybrid_block.TENorm = WrappedTorchNorm  # there are specs with Transformer Engine's layers only
    layers = [
        get_gpt_layer_local_spec(shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        for _ in range(2)
    ]
    attention, mlp = (layer.submodules for layer in layers)
    attention.mlp = attention.pre_mlp_layernorm = mlp.self_attention = mlp.input_layernorm = IdentityOp
    attention.mlp_bda = mlp.self_attn_bda = IdentityFuncOp
    submodules = hybrid_block.HybridStackSubmodules(attention_layer=layers[0], mlp_layer=layers[1], moe_layer=layers[1])
    pattern = "".join("*E" if shape.has_experts(layer) else "*-" for layer in range(shape.layers))
    model = HybridModel(
        config,
        ModuleSpec(hybrid_block.HybridStack, submodules=submodules),
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        pg_collection=runtime.groups,
    )
    state = model.sharded_state_dict()
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, interop.gpt_compatible_layer_maps(pattern))
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(converted / "release"))["model"], strict=True)
    hf, mappings, equal = HFReader(folder), parameter_mappings(shape), 0
    for name, parameter in model.named_parameters():
        old = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) // 2}", name)
        mapping = mappings[old.replace("final_norm", "final_layernorm")]
        equal += bool((parameter.data == megatron_tensor(mapping, hf)).all())
    return "ok" if equal == len(mappings) else f"FAILED: {equal} of {len(mappings)} parameters"


def check_case(name: str, folder: Path, work: Path) -> dict[str, str]:
    from megatron_dapo.processes.fork_ranks import run_ranks
    from megatron_dapo.weights.convert import hf_to_megatron, megatron_to_hf
    from megatron_dapo.weights.verify import verify

    _, world, options = CASES[name]
    converted, saved = work / "converted", work / "saved" / "release"
    hf_to_megatron(folder, converted)
    saved.mkdir(parents=True)
    cells = {"in": "ok", "out": "FAILED"}
    try:
        left = set().union(*run_ranks(world, load_and_save, folder, converted, saved, options, timeout=300))
        if strange := [key for key in left if not any(part in key for part in LEFT)]:
            cells["in"] = f"FAILED: not read: {strange[0]}"
        (saved.parent / "latest_checkpointed_iteration.txt").write_text("release")
        megatron_to_hf(saved.parent, work / "hf", reference=folder)
        cells["out"] = "ok" if verify(work / "hf", folder).same else "FAILED: other weights"
    except Exception as error:
        cells["in"] = f"FAILED: {str(error).strip().splitlines()[-1][:160]}"
    if importlib.util.find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") and world == 1:
        try:
            (cells["hybrid"],) = run_ranks(1, load_in_hybrid, folder, converted, timeout=300)
        except Exception as error:
            cells["hybrid"] = f"FAILED: {str(error).strip().splitlines()[-1][:160]}"
    if os.environ.get("SLIME") and world == 1:
        cells["slime"] = slime_export(folder, converted, work / "slime")
    return cells


def slime_export(folder: Path, converted: Path, out: Path) -> str:
    from megatron_dapo.weights.verify import verify

    tool, release = ROOT / "tests" / "support" / "slime_export.py", converted / "release"
    paths = ["--input-dir", str(release), "--output-dir", str(out), "--origin-hf-dir", str(folder)]
    done = subprocess.run([sys.executable, str(tool), *paths], capture_output=True, text=True)
    if done.returncode:
        return f"FAILED: {done.stderr.strip().splitlines()[-1][:160]}"
    return "ok" if verify(out, folder).same else "FAILED: other weights"


def run_cases(names: list[str]) -> None:
    """Prints one JSON object per case."""
    sys.path += [str(ROOT), str(ROOT / "tests" / "weights")]
    import megatron.core

    tiny_qwen = importlib.import_module("tiny_qwen")

    print(json.dumps({"version": megatron.core.__version__, "python": sys.version.split()[0]}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            kind, model = CASES[name][0], Path(folder) / CASES[name][0]
            if not model.exists():
                tiny_qwen.save(tiny_qwen.build(kind), model)
            print(json.dumps({"case": name} | check_case(name, model, Path(folder) / str(number))), flush=True)


# ---- the table ----


def unpack(version: str, folder: Path) -> Path:
    """The wheel of this version, whatever Python it asks for."""
    place = folder / version
    if not place.is_dir():
        command = ["download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-q", "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", *command, f"megatron-core=={version}"], check=True)
        (wheel,) = folder.glob(f"megatron_core-{version}-*.whl")
        zipfile.ZipFile(wheel).extractall(place)
    return place


def run_version(version: str | None, names: list[str], args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    paths = [str(ROOT)] if version is None else [str(unpack(version, args.folder)), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [args.python, __file__, "--run", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        reason = f"FAILED: {done.stderr.strip().splitlines()[-1][:160]}"
        return f"{version} (does not start)", {name: {"in": reason} for name in names}
    title = f"{lines[0]['version']}, Python {lines[0]['python']}"
    return title, {line.pop("case"): line for line in lines[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=[None], metavar="VERSION", help="of megatron-core")
    parser.add_argument("--python", default=sys.executable, help="interpreter for them (default: this one)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "megatron-core", help="for wheels")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_cases(args.run)
        return 0
    names = [name for name in CASES if args.only in name]
    results = dict(run_version(version, names, args) for version in args.versions)
    print(f"| model and layout | {' | '.join(results)} |\n" + "|---" * (1 + len(results)) + "|")
    for name in names:
        cells = [
            ", ".join(f"{way} {cell}" for way, cell in found.get(name, {"": "FAILED: no result"}).items())
            for found in results.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    bad = sum("FAILED" in str(found) for table in results.values() for found in table.values())
    print(f"{len(names)} cases × {len(results)} versions, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
