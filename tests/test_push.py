"""Publishing a drafter: the card, what a push lists and refuses, and the upload itself, against a Hub in this process."""

import base64
import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import ModelCard

from longspark_hf import LongSparkConfig
from longspark_hf.card_longspark import CARD_MARK
from longspark_hf.hub import model_card, plan_push
from longspark_hf.hub.push import MODULES

from .targets import build, random_drafter
from .test_hub import COMMON, WITHOUT_PACKAGE, pickle_that_would_run, run_python


SHIPPED = Path(__file__).parents[1] / "examples" / "LongSpark-SmolLM2-135M-Instruct"
TARGET = "someone/Tiny-Qwen3"
# A token of the right shape that no one has ever had; put together here so that no scanner finds it in this file.
TOKEN = "hf" + "_" + "a1B2" * 9


class Hub:
    """The part of the Hub's API that creating a repository, uploading to it and loading from it needs."""

    def __init__(self):
        hub = self
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.created: list[dict] = []
        self.commits: list[dict] = []
        self.blobs: dict[str, bytes] = {}
        self.modes: dict[str, str] = {}
        self.tokens: set[str | None] = set()
        self.requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = unquote(self.path.partition("?")[0])
                hub.requests.append(f"{self.command} {path}")
                for method, pattern, answer in hub.routes:
                    match = re.fullmatch(pattern, path)
                    if method == self.command and match:
                        if method == "POST":
                            hub.tokens.add(self.headers.get("Authorization"))
                        answer(self, body, *match.groups())
                        return
                self.reply(404, X_Error_Code="EntryNotFound")

            do_GET = do_POST = do_PUT = do_HEAD = handle_one

        repo = r"([\w.-]+/[\w.-]+)"
        self.routes = [
            ("POST", "/api/repos/create", self.create),
            ("POST", "/api/validate-yaml", lambda h, _: h.reply(200, b'{"warnings": [], "errors": []}')),
            ("POST", f"/api/models/{repo}/branch/(.+)", self.branch),
            ("POST", f"/api/models/{repo}/preupload/(.+)", self.preupload),
            ("POST", rf"/{repo}\.git/info/lfs/objects/batch", self.batch),
            ("PUT", "/store/([0-9a-f]{64})", self.store),
            ("POST", "/verify/([0-9a-f]{64})", self.verify),
            ("POST", f"/api/models/{repo}/commit/(.+)", self.commit),
            ("GET", f"/api/models/{repo}/revision/(.+)", self.revision),
            ("GET", f"/api/models/{repo}", lambda h, body, name: self.revision(h, body, name, "main")),
            ("HEAD", f"/{repo}/resolve/([^/]+)/(.+)", self.resolve),
            ("GET", f"/{repo}/resolve/([^/]+)/(.+)", self.resolve),
        ]
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @staticmethod
    def json(handler, content) -> None:
        handler.reply(200, json.dumps(content).encode(), Content_Type="application/json")

    def create(self, handler, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        self.created.append(asked)
        if name.startswith("others/"):
            handler.reply(403)
            return
        if name in self.repos:
            handler.reply(409)
            return
        self.repos[name] = {"main": {}}
        self.json(handler, {"url": f"{self.address}/{name}", "name": name})

    def branch(self, handler, _, name, branch):
        known = branch in self.repos[name]
        self.repos[name].setdefault(branch, {})
        handler.reply(409 if known else 200)

    def preupload(self, handler, body, *_):
        files = json.loads(body)["files"]
        self.modes |= {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in files}
        answer = [{"path": f["path"], "uploadMode": self.modes[f["path"]], "shouldIgnore": False} for f in files]
        self.json(handler, {"files": answer})

    def batch(self, handler, body, _):
        objects = json.loads(body)["objects"]
        for entry in objects:
            entry["actions"] = {
                "upload": {"href": f"{self.address}/store/{entry['oid']}"},
                "verify": {"href": f"{self.address}/verify/{entry['oid']}"},
            }
        self.json(handler, {"transfer": "basic", "objects": objects})

    def store(self, handler, body, oid):
        self.blobs[oid] = body
        handler.reply(200)

    def verify(self, handler, body, oid):
        asked, stored = json.loads(body), self.blobs.get(oid, b"")
        good = hashlib.sha256(stored).hexdigest() == oid and len(stored) == asked["size"]
        handler.reply(200 if good else 422)

    def commit(self, handler, body, name, revision):
        header, *entries = [json.loads(line) for line in body.splitlines()]
        files = self.repos[name][revision]
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        self.commits.append({"repo": name, "revision": revision, **header["value"]})
        self.json(handler, {"commitUrl": f"{self.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def revision(self, handler, _, name, revision):
        files = self.repos.get(name, {}).get("main" if revision == "1" * 40 else revision)
        if files is None:
            handler.reply(404, X_Error_Code="RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in files]
        self.json(handler, {"id": name, "modelId": name, "sha": "1" * 40, "siblings": siblings, "tags": []})

    def resolve(self, handler, _, name, revision, path):
        if name not in self.repos:
            handler.reply(404, X_Error_Code="RepoNotFound")
            return
        files = self.repos[name].get("main" if revision == "1" * 40 else revision, {})
        if path not in files:
            handler.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit="1" * 40)
            return
        etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        handler.reply(200, files[path], ETag=etag, X_Repo_Commit="1" * 40)


@pytest.fixture
def hub():
    with Hub() as running:
        yield running


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target and its drafter's folder, ready to be pushed but for its license."""
    folder = tmp_path_factory.mktemp("made")
    target = build("qwen3")
    target.save_pretrained(folder / "target")
    random_drafter(target, target_name_or_path=TARGET).save_pretrained(folder / "drafter")
    prompt = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(7))
    (folder / "prompt.json").write_text(json.dumps(prompt.tolist()))
    return folder, target.generate(prompt, do_sample=False, max_new_tokens=16)[0].tolist()


@pytest.fixture
def folder(made, tmp_path):
    """A copy of that folder, to be spoiled."""
    shutil.copytree(made[0] / "drafter", tmp_path / "drafter")
    return tmp_path / "drafter"


def plan(folder: Path, **arguments):
    return plan_push(folder, "me/tiny", **({"license": "apache-2.0"} | arguments))


# --- the dry run -----------------------------------------------------------------------------------------------------


def test_a_plan_lists_exactly_the_files_their_sizes_and_the_card(folder):
    (folder / "__pycache__").mkdir()
    planned = plan(folder)
    assert set(planned.files) == {*MODULES, "README.md", "config.json", "model.safetensors"}
    assert planned.files["README.md"] == len(planned.card.encode())
    assert all(planned.files[name] == (folder / name).stat().st_size for name in set(planned.files) - {"README.md"})
    assert planned.total_bytes == sum(planned.files.values()) and planned.left_out == ["__pycache__"]
    assert 'from_pretrained("me/tiny", revision="COMMIT", trust_remote_code=True' in planned.card
    assert 'license: "' not in (folder / "README.md").read_text(), "planning wrote into the folder"


def test_a_card_of_ones_own_is_taken_as_it_is(folder):
    planned = plan(folder)
    own = planned.card.replace(CARD_MARK, "").replace("## Limits", "## What I found")
    (folder / "README.md").write_text(own)
    assert plan(folder, license="mit").card == own


def test_a_card_without_what_the_hub_needs_is_refused(folder):
    with pytest.raises(ValueError, match="no `license`"):
        plan(folder, license=None)
    (folder / "README.md").write_text("---\ntags: [longspark]\nlicense: mit\n---\nhello")
    with pytest.raises(ValueError, match="no `library_name`.*no `base_model`.*lacks the tags speculative-decoding"):
        plan(folder)
    (folder / "README.md").write_text("---\ntags: [\n---\nhello")
    with pytest.raises(ValueError, match="cannot be read"):
        plan(folder)


def spoil_config(**fields):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def write(name, content="x"):
    return lambda folder: (folder / name).write_text(content)


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def metadata_in_weights(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt", "note": TOKEN})


REFUSED = {
    "pickle": (lambda f: pickle_that_would_run(f / "pytorch_model.bin"), "pytorch_model.bin holds weights"),
    "optimizer": (write("optimizer.pt"), "optimizer.pt holds weights"),
    "other safetensors": (write("adapter_model.safetensors"), "adapter_model.safetensors holds weights"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "truncated": (cut_weights, "truncated"),
    "stray": (write("train.py"), "train.py does not belong to a drafter"),
    "stray json": (write("trainer_state.json", "{}"), "trainer_state.json does not belong"),
    "folder": (lambda f: (f / "checkpoint-5").mkdir(), "checkpoint-5/ is a folder"),
    "link": (lambda f: (f / "LICENSE").symlink_to("/etc/passwd"), "LICENSE is a link"),
    "env": (write(".env", "A=1"), r"\.env looks like a secret"),
    "netrc": (write(".netrc"), r"\.netrc looks like a secret"),
    "ssh key": (write("id_ed25519"), "id_ed25519 looks like a secret"),
    "pem": (write("server.pem"), "server.pem looks like a secret"),
    "token in card": (write("README.md", f"export HF_TOKEN={TOKEN}"), "README.md holds a Hugging Face token"),
    "token in config": (spoil_config(problem_type=TOKEN), "config.json holds a Hugging Face token"),
    "token in weights": (metadata_in_weights, "model.safetensors holds a Hugging Face token"),
    "private key": (write("LICENSE", "-----BEGIN OPENSSH " + "PRIVATE KEY-----"), "LICENSE holds a private key"),
    "password": (write("NOTICE", "https://me:secret1@host/x"), "NOTICE holds a password in an address"),
    "local target": (spoil_config(target_name_or_path="/home/me/qwen"), "'/home/me/qwen', not the Hub id"),
    "more foreign code": (
        spoil_config(
            auto_map={
                "AutoConfig": "configuration_longspark.LongSparkConfig",
                "AutoModel": "modeling_longspark.LongSparkDrafter",
                "AutoModelForCausalLM": "evil/repo--evil.X",
            }
        ),
        "`auto_map` in config.json has AutoModelForCausalLM = 'evil/repo",
    ),
    "foreign pipeline": (spoil_config(custom_pipelines={"x": {"impl": "evil/repo--evil.P"}}), "`custom_pipelines`"),
    "foreign code": (
        spoil_config(auto_map={"AutoConfig": "x--configuration_longspark.LongSparkConfig"}),
        "`auto_map` in config.json has AutoConfig = 'x--",
    ),
    "changed module": (write("tap_longspark.py", "import os"), "tap_longspark.py are not those of this version"),
    "missing module": (lambda f: (f / "tap_longspark.py").unlink(), "tap_longspark.py are not those"),
    "released format": (spoil_config(model_type="draftfreekv"), "`longspark convert` first"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_push_is_refused(case, folder):
    plan(folder)
    spoil, message = REFUSED[case]
    spoil(folder)
    with pytest.raises(ValueError, match=message) as error:
        plan(folder)
    assert TOKEN not in str(error.value)


def test_all_that_is_wrong_is_told_at_once(folder):
    for name in ("train.py", ".env", "optimizer.pt"):
        (folder / name).write_text("x")
    with pytest.raises(ValueError, match=r"\.env looks.*optimizer\.pt holds.*train\.py does not"):
        plan(folder)


def test_further_files_are_included_by_name_and_looked_at_too(folder):
    (folder / "train.py").write_text("print('how it was trained')")
    assert plan(folder, include=("train.py",)).files["train.py"] == 27
    (folder / "train.py").write_text(f"token = '{TOKEN}'")
    with pytest.raises(ValueError, match="train.py holds a Hugging Face token"):
        plan(folder, include=("train.py",))
    with pytest.raises(ValueError, match="notes.md is to be included and is not there"):
        plan(folder, include=("train.py", "notes.md"))
    (folder / "optimizer.pt").write_text("x")
    with pytest.raises(ValueError, match="optimizer.pt holds weights"):
        plan(folder, include=("train.py", "optimizer.pt"))


@pytest.mark.parametrize("repo_id", ["tiny", "me/", "a/b/c", "me/ti ny"])
def test_a_name_that_is_no_repositorys_is_refused(repo_id, folder):
    with pytest.raises(ValueError, match="repo"):
        plan_push(folder, repo_id, license="mit")


# --- the upload ------------------------------------------------------------------------------------------------------

PUSH = """
from longspark_hf.hub import plan_push, push
plan = plan_push("drafter", "me/tiny", license="apache-2.0", private=True, revision=REVISION, commit_message="First")
print(json.dumps(push(plan, token="TOKEN")))
"""


def online(hub: Hub) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def script(push: str, revision: str | None) -> str:
    return f"import json\nREVISION = {revision!r}\n{push}"


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_push_uploads_what_was_planned_and_it_loads_from_there_without_the_package(revision, made, hub):
    folder, plain = made
    planned = plan(folder / "drafter")
    url = run_python(folder, script(PUSH, revision), **online(hub))

    assert url == f"{hub.address}/me/tiny/commit/{'1' * 40}"
    files = hub.repos["me/tiny"][revision or "main"]
    assert {name: len(content) for name, content in files.items()} == planned.files
    for name in set(files) - {"README.md"}:
        assert files[name] == (folder / "drafter" / name).read_bytes(), name
    assert files["README.md"].decode() == planned.card
    assert hub.modes["model.safetensors"] == "lfs" and hub.modes["config.json"] == "regular"
    assert [c["summary"] for c in hub.commits] == ["First"] and hub.commits[0]["revision"] == (revision or "main")
    assert hub.created[0]["visibility"] == "private" and hub.tokens == {"Bearer TOKEN"}

    if revision is None:
        found = run_python(
            folder,
            WITHOUT_PACKAGE,
            COMMON,
            """
            drafter = AutoModel.from_pretrained("me/tiny", revision="1" * 40, trust_remote_code=True).eval()
            target = AutoModelForCausalLM.from_pretrained("target").eval()
            print(json.dumps(answer(target, torch.tensor(json.load(open("prompt.json"))), drafter)))
            """,
            **online(hub),
        )
        assert found["tokens"] == plain and found["rounds"] > 0
        assert found["class"].startswith("transformers_modules.me.tiny.")


def test_a_refusal_of_the_hub_and_a_changed_file_are_told(made, hub, tmp_path):
    folder, _ = made
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    found = run_python(
        tmp_path,
        """
        import json
        from longspark_hf.hub import plan_push, push
        messages = []
        for name in ("others/tiny", "me/tiny"):
            plan = plan_push("drafter", name, license="mit")
            if name == "me/tiny":
                open("drafter/config.json", "a").write(" ")
            try:
                push(plan, token="TOKEN")
            except ValueError as error:
                messages.append(str(error))
        print(json.dumps(messages))
        """,
        **online(hub),
    )
    assert "The upload to others/tiny failed" in found[0] and "hf auth login" in found[0]
    assert "config.json has changed since it was looked at" in found[1]
    assert hub.repos == {} and hub.commits == []


def test_push_to_hub_writes_our_card_where_the_repository_has_none(made, hub):
    folder, _ = made
    run_python(
        folder,
        """
        import json
        from longspark_hf import LongSparkDrafter
        LongSparkDrafter.from_pretrained("drafter").push_to_hub("me/direct", token="TOKEN")
        print("0")
        """,
        **online(hub),
    )
    files = hub.repos["me/direct"]["main"]
    assert set(files) == {*MODULES, "README.md", "config.json", "model.safetensors"}
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == TARGET and "longspark" in card.data.tags
    assert "Not a standalone model" in card.text and 'from_pretrained("me/direct"' in card.text


def test_weights_on_the_hub_are_checked_like_local_ones(made, hub):
    folder, _ = made
    drafter = {path.name: path.read_bytes() for path in (folder / "drafter").iterdir()}
    without = {name: content for name, content in drafter.items() if name != "model.safetensors"}
    hub.repos["me/pickle"] = {"main": without | {"pytorch_model.bin": b"x"}}
    hub.repos["me/cut"] = {"main": drafter | {"model.safetensors": drafter["model.safetensors"][:-8]}}
    hub.repos["me/adapter"] = {"main": drafter | {"adapter_config.json": b'{"base_model_name_or_path": "me/other"}'}}
    hub.repos["me/empty"] = {"main": without}
    found = run_python(
        folder,
        """
        import json
        from longspark_hf import LongSparkDrafter
        messages = {}
        for name in ("pickle", "cut", "adapter", "empty"):
            try:
                LongSparkDrafter.from_pretrained(f"me/{name}")
            except (ValueError, OSError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(messages))
        """,
        **online(hub),
    )
    assert re.search("ValueError: .*as a pickle.*pytorch_model.bin", found["pickle"])
    assert re.search("ValueError: .*truncated", found["cut"])
    assert re.search("ValueError: .*adapter_config.json", found["adapter"])
    assert found["empty"].startswith("OSError") and "model.safetensors" in found["empty"]
    assert not [line for line in hub.requests if line.startswith("GET") and line.endswith("pytorch_model.bin")]


# --- the card --------------------------------------------------------------------------------------------------------


def shipped_results() -> dict:
    return json.loads((SHIPPED / "results.json").read_text())


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+", text))


def test_the_shipped_drafters_results_become_its_card():
    results, config = shipped_results(), LongSparkConfig.from_pretrained(SHIPPED)
    card = model_card(
        config, "me/LongSpark-SmolLM2", [results], license="apache-2.0", training_data="Its own answers."
    )
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert data["base_model"] == results["target"] and data["base_model_relation"] == "adapter"
    assert data["tags"] == ["speculative-decoding", "longspark", "custom_code"] and data["license"] == "apache-2.0"
    figures = {
        (result["dataset"]["type"], f"{metric['args']['temperature']:g}"): metric["value"]
        for result in data["model-index"][0]["results"]
        for metric in result["metrics"]
    }
    expected = {(name, t): round(value, 4) for name, by_t in results["tau"].items() for t, value in by_t.items()}
    assert figures == expected
    for name, by_t in results["tau"].items():
        assert f"| {name} | {by_t['0']:.2f} | {by_t['1']:.2f} |" in card.text
    for part in (
        "Not a standalone model",
        "revision=",
        "## Training data\n\nIts own answers.",
        f"{results['training']['metrics_of_the_best_checkpoint']['step']:,} optimizer steps",
    ):
        assert part in card.text
    usage = re.search(r"```python\n(.*?)\n```", card.text, re.DOTALL).group(1)
    assert len(usage.splitlines()) == 5 and compile(usage, "card", "exec")
    assert "/work/" not in str(card), "a path of this machine is on the card"


def test_a_card_without_result_files_has_no_figure(qwen3):
    drafter = random_drafter(qwen3, target_name_or_path=TARGET)
    card = model_card(drafter.config, "me/tiny", license="mit")
    assert "model-index" not in card.data.to_dict() and "Measured" not in card.text and "τ" not in card.text
    # The size of the state follows from the config.
    assert numbers_in(card.text) == {f"{drafter.config.state_bytes() / 2**20:.1f}"}


def test_what_only_the_caller_knew_is_not_written_over(folder):
    config = LongSparkConfig.from_pretrained(folder)
    for own in ({"sections": "## Ablations\n\nNone."}, {"training_data": "Answers of the target."}):
        card = model_card(config, "me/tiny", license="mit", **own)
        assert next(iter(own.values())) in card.text
        card.save(folder / "README.md")
        assert plan(folder).card == str(card)


def bench_result(**overrides) -> dict:
    row = {"task": "gsm8k", "temperature": 0.0, "prompts": 8, "new_tokens": 100.0, "tau": 3.21, "speedup": 1.87}
    rows = [row | {"method": "longspark"}, row | {"method": "plain", "tau": None, "speedup": 1.0}]
    source = {"date": "2026-11-29", "dtype": "bfloat16", "device": "NVIDIA H200", "torch": "2.13.0"}
    return {"kind": "bench", "target": TARGET, "rows": rows, "provenance": source} | overrides


def test_figures_of_a_bench_go_on_the_card_with_where_they_were_measured(qwen3):
    config = random_drafter(qwen3, target_name_or_path=TARGET).config
    card = model_card(config, "me/tiny", [bench_result()], license="mit")
    assert "| gsm8k | 3.21 | 1.87 |" in card.text and "bfloat16 on NVIDIA H200" in card.text
    metrics = card.data.to_dict()["model-index"][0]["results"][0]["metrics"]
    assert {m["type"]: m["value"] for m in metrics} == {"tau": 3.21, "speedup": 1.87}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"provenance": None}, "without its provenance"),
        ({"target": "someone/Else"}, "measured with someone/Else"),
        ({"kind": "sweep"}, "no known kind"),
    ],
    ids=["no provenance", "another target", "another kind"],
)
def test_a_result_that_belongs_on_no_card_is_refused(overrides, message, qwen3):
    config = random_drafter(qwen3, target_name_or_path=TARGET).config
    with pytest.raises(ValueError, match=message):
        model_card(config, "me/tiny", [bench_result(**overrides)])


def test_results_in_the_folder_are_pushed_and_shown_on_the_card(folder):
    (folder / "bench.json").write_text(json.dumps(bench_result()))
    planned = plan(folder)
    assert "bench.json" in planned.files and "| gsm8k | 3.21 | 1.87 |" in planned.card
