# SPDX-License-Identifier: Apache-2.0
"""What .github and .pre-commit-config.yaml call exists: files, targets of make, presets of cmake, suites of tests/run.sh, versions."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import V5

yaml = pytest.importorskip("yaml")
if not V5:
    pytest.skip("one version is enough", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FOLDERS = ("tests/", "tools/", "bench/", "examples/", "python/", "src/", ".github/", ".ci/", "docs/")


def load(path):
    data = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in data.items()}  # YAML 1.1: "on" is a truth value


def commands(workflow):
    """Each shell command of a workflow, once for each row of its matrix."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = matrix.get("include") or [{key: value} for key, values in matrix.items() for value in values] or [{}]
        for row in rows:
            for step in job["steps"]:
                yield re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda m, row=row: str(row[m[1]]), step.get("run", ""))


def makefile_targets():
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def suites():
    text = (ROOT / "tests/suites.sh").read_text()
    units = re.search(r"^units=\(([^)]*)\)", text, re.M)[1].split()
    return set(re.findall(r'\b(?:suite|skip) "?([\w$-]+)', text)) | set(units)


def faults(command):
    """What a command names that is not there."""
    for word in re.findall(r"[\w./-]+", command):
        if word.startswith(FOLDERS) and not (ROOT / word).exists():
            yield f"no file {word}"
    for line in re.split(r"\n|&&|;", command):
        words = line.split()
        if words[:1] == ["make"]:
            yield from (f"no target {w}" for w in words[1:] if "=" not in w and w not in makefile_targets())
        if words[:1] == ["tests/run.sh"]:
            yield from (f"no suite {w}" for w in words[1:] if not w.startswith("--") and not any(w in s for s in suites()))
        if words[:1] and words[0].startswith(FOLDERS) and not os.access(ROOT / words[0], os.X_OK):
            yield f"{words[0]} cannot be executed"
        for preset in re.findall(r"--preset (\S+)", line):
            if preset not in {p["name"] for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}:
                yield f"no preset {preset}"


def test_three_workflows():
    assert [p.stem for p in WORKFLOWS] == ["nightly", "push", "release"]
    for path in WORKFLOWS:
        workflow = load(path)
        assert workflow["on"] and workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["runs-on"] and set(job.get("needs", [])) <= set(workflow["jobs"])
            assert all(("run" in step) != ("uses" in step) for step in job["steps"])
            assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_there_is(path):
    found = [command for command in commands(load(path)) if command]
    assert found and [fault for command in found for fault in faults(command)] == []


def test_scripts_of_workflows_call_what_there_is():
    text = re.sub(r"^#.*|\$1", "plan", (ROOT / ".github/fuzz.sh").read_text(), flags=re.M)
    assert list(faults(text)) == []


@pytest.mark.parametrize("command", ["make tset", "tests/run.sh nosuch", "python tools/nosuch.py", "cmake --preset no", "tools/smoke.py"])
def test_a_wrong_command_is_found(command):
    assert list(faults(command))


def test_pre_commit_calls_the_linters():
    hooks = [hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    names = re.findall(r"^(\w+)\(\) \{", (ROOT / "tools/lint.sh").read_text(), re.M)
    for hook in hooks:
        script, *linters = hook["entry"].split()
        assert os.access(ROOT / script, os.X_OK) and linters and set(linters) <= set(names)


def test_templates_are_forms():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = load(path)
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_one_version_in_all_places():
    sys.path.append(str(ROOT / "tools"))
    import release_notes

    assert len(set(release_notes.versions().values())) == 1
    assert "### Added" in release_notes.notes("0.1.0") and release_notes.notes("9.9.9") == ""
    done = subprocess.run([sys.executable, ROOT / "tools/release_notes.py", "9.9.9"], capture_output=True, text=True)
    assert done.returncode == 1 and "not 9.9.9" in done.stderr and "no section [9.9.9]" in done.stderr


def test_wheels_are_tried_with_a_script_that_exists():
    text = (ROOT / "pyproject.toml").read_text()
    assert (ROOT / re.search(r"^test-command = .*\{project\}/(\S+?)\"", text, re.M)[1]).is_file()
    assert re.search(r'^build = "cp310-', text, re.M) and 'wheel.py-api = "cp310"' in text
