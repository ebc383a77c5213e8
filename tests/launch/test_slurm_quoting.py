"""No value of a configuration can add a line, an option or a command to the batch script."""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dapo.config import ConfigError, parse_config
from megatron_dapo.config.trainer import SCRIPT_VARIABLES
from megatron_dapo.launch.slurm import check_submission
from megatron_dapo.launch.slurm_script import TEMPLATES, Job, Shell, quote, render, variable

RAW = {
    "policy": {"model": "MODEL", "micro_batch_tokens": 32768},
    "rollout": {"servers": {}, "weights": {"directory": "/runs/x/weights"}},
    "slurm": {
        "nodes": 4,
        "engine_nodes": 1,
        "router": True,
        "container_image": "IMAGE",
        "network_check": True,
    },
}
PLAIN = (
    "partition", "account", "qos", "reservation", "memory", "python", "container_image", "gpu_type",
    "engine_partition", "head_partition", "mail_user", "environment_file",
)  # fmt: skip
# Every text that reaches the script, and how to set it.
VALUES = {
    **{f"slurm.{name}": lambda raw, text, name=name: raw["slurm"].__setitem__(name, text) for name in PLAIN},
    "slurm.modules": lambda raw, text: raw["slurm"].__setitem__("modules", [text]),
    "slurm.apptainer": lambda raw, text: raw["slurm"].update(container_runtime="apptainer", container_image=text),
    "slurm.mail_type": lambda raw, text: raw["slurm"].update(mail_user="me", mail_type=text),
    "slurm.job_name": lambda raw, text: raw["slurm"].__setitem__("job_name", text or "x"),
    "slurm.environment": lambda raw, text: raw["slurm"].__setitem__("environment", {"A": text}),
    "slurm.container_mounts": lambda raw, text: raw["slurm"].__setitem__("container_mounts", [text]),
    "slurm.container_arguments": lambda raw, text: raw["slurm"].__setitem__("container_arguments", [text]),
    "policy.model": lambda raw, text: raw["policy"].__setitem__("model", text),
    "rollout.servers.python": lambda raw, text: raw["rollout"]["servers"].__setitem__("python", text),
    "rollout.servers.dtype": lambda raw, text: raw["rollout"]["servers"].__setitem__("dtype", text),
    "rollout.servers.arguments": lambda raw, text: raw["rollout"]["servers"].__setitem__("arguments", [text]),
    "rollout.servers.environment": lambda raw, text: raw["rollout"]["servers"].__setitem__("environment", {"A": text}),
}
PLACEHOLDER = "PLACEHOLDER"
HOSTILE = [
    "a\n#SBATCH --account=other", "a\ntouch /tmp/x", "$(touch x)", "`touch x`", "'; touch x; '", '"; touch x; "',
    "a b", "a #b", "\\", "%j", "{{ 7 }}", "{% raw %}", "--export=NONE", "a\r\nb", "\x00", "é\u2028b", "$A${B}", "*",
]  # fmt: skip


def script(key, text, run_dir="/runs/x", folder="/project"):
    raw = copy.deepcopy(RAW)
    if key in VALUES:
        VALUES[key](raw, text)
    rendered = render(Job(parse_config(raw), Path(run_dir), Path(folder)))
    return re.sub(r" \\\n +", " ", rendered)  # commands are wrapped by length


def quoted_forms(key, text):
    """The value as it stands in the script: a word of its own or part of a quoted word."""
    prefixes = {
        "slurm.container_image": "--container-image=", "slurm.container_mounts": "--container-mounts=",
    }  # fmt: skip
    prefix, suffix = prefixes.get(key, ""), ":8" if key == "slurm.gpu_type" else ""
    return quote(prefix + text + suffix), quote(prefix + PLACEHOLDER + suffix)


@pytest.mark.parametrize("key", VALUES)
def test_a_value_stays_inside_its_quotes(key):
    expected = script(key, PLACEHOLDER)

    @settings(max_examples=25)
    @given(st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1).filter(lambda text: text[0] != "~")))  # a home
    @example(HOSTILE[0])
    def check(text):
        try:
            found = script(key, text)
        except ConfigError:
            assert re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text), text
            return
        is_value, placeholder = quoted_forms(key, text)
        assert found.count(is_value) >= expected.count(placeholder)
        assert len(found.split("\n")) == len(expected.split("\n"))
        if len(text) > 3 and text not in expected:  # long enough to occur nowhere else
            assert found.replace(is_value, placeholder) == expected

    check()


@settings(max_examples=200)
@given(st.text(alphabet=st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"])))
def test_a_quoted_word_is_the_value(text):
    assert shlex.split(quote(text)) == [text]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_shell_reads_the_value_back(text):
    if re.search(r"[\x00-\x1f]", text):
        with pytest.raises(ConfigError, match="line break"):
            quote(text)
        return
    done = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (text, "")


def test_paths_with_line_breaks_are_refused():
    for paths in ({"run_dir": "/runs/a\nb"}, {"folder": "/a\n#SBATCH --account=x"}):
        with pytest.raises(ConfigError, match="line break"):
            script("", "", **paths)


@pytest.mark.parametrize("key", ["api_key_env", "admin_key_env"])
@pytest.mark.parametrize("name", ["A=1; touch x; B", "A B", "1A", "$(x)", "A\nB", "A]"])
def test_a_name_of_a_variable_is_a_name(key, name):
    raw = copy.deepcopy(RAW)
    raw["rollout"]["servers"][key] = name
    with pytest.raises(ConfigError, match="environment variable"):
        render(Job(parse_config(raw), Path("/runs/x"), Path("/project")))


def test_the_variables_of_the_script_are_not_the_users():
    """Every name that a template assigns is refused in slurm.environment, where the script would overwrite it."""
    text = "\n".join(re.sub(r"{[#%].*?[#%]}", "", path.read_text(), flags=re.S) for path in TEMPLATES.glob("*.j2"))
    text = re.sub(r"^\s*#.*|  #.*", "", text, flags=re.M)
    lists = re.findall(r"\b(?:read -r|mapfile -t|printf -v|for|local|declare -A) ([\w ]+)", text)
    words = [word for words in lists for word in re.split(r"\bin\b", words)[0].split()]
    assigned = set(re.findall(r"(?:^|(?<=[\s;\"'(]))([A-Za-z_]\w*)\+?=(?![=~])", text, flags=re.M)) | {*words}
    assigned -= {"CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONPATH", "GROUP_"}  # keep the values they have; GROUP_0, GROUP_1
    assert {"RUN", "NODES", "ENGINES", "MASTER_ADDR", "node", "index"} <= assigned
    assert assigned == SCRIPT_VARIABLES
    for name in ("ENGINES", "GROUP_0"):
        for change in ({"environment": {name: "1"}}, {"webhook_env": name}):
            with pytest.raises(ConfigError, match=f"{name} is a variable of the batch script: use another name"):
                parse_config(RAW | {"slurm": RAW["slurm"] | change})


def test_the_name_of_the_job_stays_inside_the_text_of_the_webhook(tmp_path):
    """The text is JSON whatever the name is. curl gets it, and the URL on its standard input."""
    name = "a\"b'c $(touch x) %s \\ é"
    raw = copy.deepcopy(RAW)
    raw["slurm"] |= {"job_name": name, "webhook_env": "HOOK"}
    text = render(Job(parse_config(raw), tmp_path, tmp_path))
    leave = text[text.index("leave() {") : text.index("finish() {")]
    program = f'say() {{ echo "$*"; }}\ncurl() {{ printf %s "$9" > sent; cat > config; }}\n{leave}\nleave 3'
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env={"SLURM_JOB_ID": "7", "HOOK": "https://x/secret", "PATH": "/bin"}
    )
    assert done.returncode == 3
    found = (tmp_path / "sent").read_text()
    assert json.loads(found) == {"text": f"{name} (job 7) ended with code 3"}
    assert (tmp_path / "config").read_text() == 'url = "https://x/secret"\n'


def test_our_own_shell_text_is_not_quoted():
    assert quote(Shell('"$1"')) == '"$1"' and variable("A_1") == "A_1"


def test_extra_options_stay_options_of_one_line():
    raw = copy.deepcopy(RAW)
    raw["slurm"]["extra"] = ["--comment='a b; c'", "-C h100", "--constraint=[a|b]"]
    lines = render(Job(parse_config(raw), Path("/runs/x"), Path("/project"))).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")][-3:] == [
        "#SBATCH '--comment=a b; c'", "#SBATCH -C h100", "#SBATCH '--constraint=[a|b]'",
    ]  # fmt: skip


def test_a_real_slurm_reads_the_values_back(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    name = "a b; touch $HOME #'c' \"d\" `e`"
    raw = {
        "policy": {"micro_batch_tokens": 32768}, "rollout": {"engine": "embedded"},
        "slurm": {
            "gpus_per_node": 0, "exclusive": False, "job_name": name, "extra": ["--comment='x y #z'", "--hold"],
            "time": "5",
        },
    }  # fmt: skip
    file = tmp_path / "job.sbatch"
    file.write_text(render(Job(parse_config(raw), tmp_path / "run", tmp_path)))
    check_submission(file)
    job = int(cluster.run("sbatch", "--parsable", str(file)))
    try:
        assert cluster.run("squeue", "-h", "-j", str(job), "-o", "%j|%k") == f"{name}|x y #z"
    finally:
        cluster.run("scancel", str(job))
