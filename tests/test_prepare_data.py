"""`prores prepare-data`: real files in, Megatron's own reader and tokenizer on what comes out."""

import argparse
import gzip
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prores import cli
from megatron_prores.data import prepare
from megatron_prores.data.parallel import encode_documents
from megatron_prores.data.prepare import held_out
from megatron_prores.data.sources import Corpus, Document
from megatron_prores.data.staging import publish
from megatron_prores.data.tokenizer import END_OF_TEXT, Encoder, load_tokenizer, split_text, train_tokenizer
from megatron_prores.errors import UserError

# Of Megatron's reader, outside a training run.
pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")

TEXTS = [
    "The quick brown fox\njumps over the lazy dog.\n",
    "Zwölf Boxkämpfer jagen Viktor 🦊 quer über den Sylter Deich — ça va?\r\n\ttabs  and   spaces ",
    "def f(x):\n    return x ** 2  # 平方\n",
    f"a text may spell {END_OF_TEXT} and goes on",
    "x",
]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A small byte-level tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(TEXTS * 3, 400).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(bpe):
    return load_tokenizer(str(bpe))


def prores(*words):
    """The command, in this process; with one worker unless told otherwise."""
    cli.run(["prepare-data", "--workers", "1", *map(str, words)])


def lines(texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts)


def zstd(content):
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


def read(prefix):
    """The documents as Megatron reads them, each as a list of ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    # One sequence per document: documents begin at sequences 0, 1, 2, ... and end at the number of sequences.
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def texts_of(prefix, tokenizer):
    tokenizer = load_tokenizer(str(tokenizer))
    documents = read(prefix)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in documents)
    return [tokenizer.decode(ids[:-1]) for ids in documents]


def one_document_ids(tmp_path, tokenizer, text):
    (tmp_path / "one.txt").write_bytes(text.encode())
    prores("--input", tmp_path / "one.txt", "--output", tmp_path / "one", "--tokenizer", tokenizer)
    (ids,) = read(tmp_path / "one")
    return ids


# Inputs


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path)


def write_folder(path):
    (path / "sub" / "deep").mkdir(parents=True)
    for name, text in zip(["a.txt", "b.py", "sub/deep/c", "sub/e.json", "z.md"], TEXTS, strict=True):
        (path / name).write_bytes(text.encode())


def write_shards(path):
    path.mkdir()
    (path / "0.jsonl").write_text(lines(TEXTS[:2]))
    (path / "1.json.gz").write_bytes(gzip.compress(lines(TEXTS[2:]).encode()))


INPUTS = {
    "data.jsonl": lambda path: path.write_text(lines(TEXTS)),
    "data.json": lambda path: path.write_text("\ufeff" + lines(TEXTS) + "\n \n"),
    "data.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS).encode())),
    # Several members or frames in one file, as `cat` and parallel compressors make them.
    "members.jsonl.gz": lambda path: path.write_bytes(b"".join(gzip.compress(lines([t]).encode()) for t in TEXTS)),
    "data.jsonl.zst": lambda path: path.write_bytes(zstd(lines(TEXTS).encode())),
    "frames.jsonl.zst": lambda path: path.write_bytes(b"".join(zstd(lines([t]).encode()) for t in TEXTS)),
    "data.parquet": write_parquet,
    "folder": write_folder,
    "shards": write_shards,
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_gives_the_same_documents(name, tmp_path, bpe):
    INPUTS[name](tmp_path / name)
    prores("--input", tmp_path / name, "--output", tmp_path / "out", "--tokenizer", bpe)
    assert texts_of(tmp_path / "out", bpe) == TEXTS


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".rst"])
def test_text_files_are_one_document_each_in_the_order_given(suffix, tmp_path, bpe):
    pack = {".gz": gzip.compress, ".zst": zstd}.get(Path("x" + suffix).suffix, bytes)
    paths = [tmp_path / f"{9 - i}{suffix}" for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_bytes(pack(text.encode()))
    prores("--input", *paths, "--output", tmp_path / "out", "--tokenizer", bpe)
    assert texts_of(tmp_path / "out", bpe) == TEXTS


def test_json_key(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS, key="content"))
    prores("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", bpe, "--json-key", "content")
    assert texts_of(tmp_path / "out", bpe) == TEXTS


def test_a_folder_leaves_out_what_is_not_text(tmp_path, capsys, bpe):
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "b.py").write_text("second")
    (folder / "a.py").write_text("first")
    (folder / "empty.py").write_text(" \n")
    (folder / "latin1.py").write_bytes(b"caf\xe9")
    (folder / "binary.py").write_bytes(b"ELF\0\0")
    (folder / "c.txt").write_text("another suffix")
    (folder / "dangling.py").symlink_to(folder / "nowhere")
    prores("--input", folder, "--output", tmp_path / "out", "--tokenizer", bpe, "--glob", "*.py", "*.rs")
    assert texts_of(tmp_path / "out", bpe) == ["first", "second"]
    assert "2 files that are not UTF-8 text, 1 empty documents" in capsys.readouterr().out


def test_stdlib_is_the_library_alone():
    origins = [document.origin for document in Corpus(["stdlib"])]
    assert any(origin.endswith("/json/decoder.py") for origin in origins)
    assert len(origins) > 300 and origins == sorted(origins, key=lambda origin: origin)
    parts = {part for origin in origins for part in Path(origin).parts}
    assert not parts & {"site-packages", "test", "idlelib", "lib2to3", "__pycache__"}
    assert all(origin.endswith(".py") for origin in origins)


def test_names_of_hugging_face_datasets(tmp_path):
    """A dataset in the local cache is read by name without network; a name that nobody knows is one line."""
    import datasets

    (tmp_path / "tiny_corpus").mkdir()
    write_parquet(tmp_path / "tiny_corpus" / "train.parquet")
    datasets.load_dataset(str(tmp_path / "tiny_corpus"), cache_dir=str(tmp_path / "cache"))
    script = """
from megatron_prores.data.sources import Corpus
from megatron_prores.errors import UserError
import json
corpus = Corpus(["tiny_corpus"], split="train[1:]")
assert list(corpus) == list(corpus)
result = [[d.text for d in corpus]]
for name, options in [("nobody/nothing", {}), ("tiny_corpus", {"split": "dev"}), ("tiny_corpus", {"json_key": "body"})]:
    try:
        Corpus([name], **options)
    except UserError as error:
        result.append(str(error))
print(json.dumps(result))
"""
    away = tmp_path / "elsewhere"
    away.mkdir()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script], cwd=away, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    texts, unknown, split, column = json.loads(done.stdout)
    assert texts == TEXTS[1:]
    assert unknown.startswith("'nobody/nothing' is neither an existing file or folder nor a Hugging Face dataset")
    assert "dev" in split
    assert column == "tiny_corpus: no column 'body' (columns: 'id', 'text'); --json-key names the column"


# Tokenizers


def test_trained_tokenizer_is_what_megatron_loads(tmp_path, capsys):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    (tmp_path / "a.jsonl").write_text(lines(TEXTS * 20))
    prefix = tmp_path / "my corpus"
    prores("--input", tmp_path / "a.jsonl", "--output", prefix, "--train-tokenizer", 300)
    printed = capsys.readouterr().out
    flags = shlex.split(printed[printed.index("--tokenizer-type") :])
    parser = argparse.ArgumentParser()
    for name in ("--tokenizer-type", "--tokenizer-model", "--data-path", "--split"):
        parser.add_argument(name)
    args = parser.parse_args(flags)
    assert args.data_path == str(prefix)
    # The other attributes as Megatron's parser leaves them when they are not given.
    for name in ("chat_template", "vocab_file", "merge_file", "special_tokens", "metadata_path", "padded_vocab_size"):
        setattr(args, name, None)
    for name in ("tokenizer_hf_no_use_fast", "trust_remote_code", "tokenizer_hf_no_include_special_tokens"):
        setattr(args, name, False)
    args.pad_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, args.rank = True, 128, 1, 0
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, args.padded_vocab_size) == (300, 384)
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_TEXT
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS if END_OF_TEXT not in text] * 20
    assert [ids for ids in read(prefix) if END_OF_TEXT not in tokenizer.detokenize(ids[:-1])] == expected


@settings(deadline=None, max_examples=300)
@given(text=st.text())
def test_round_trip_of_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    (ids,) = Encoder.of(tokenizer, np.uint16).encode([text])
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("aé1_ .\n\t平")), size=st.integers(1, 20))
def test_long_texts_are_cut_where_it_does_not_matter(tokenizer, text, size):
    pieces = list(split_text(text, size))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer(piece).input_ids] == tokenizer(text).input_ids


def test_long_texts_are_cut():
    assert [len(piece) for piece in split_text("word " * 10, 12)] == [14, 15, 15, 6]


def test_a_spelled_out_special_token_does_not_end_the_document(tmp_path, bpe, tokenizer):
    ids = one_document_ids(tmp_path, bpe, f"a{END_OF_TEXT}b{END_OF_TEXT}")
    assert ids.count(tokenizer.eos_token_id) == 1


def test_what_the_tokenizer_puts_around_a_text_is_kept_and_eos_is_not_doubled(tmp_path):
    import tokenizers
    import transformers

    backend = train_tokenizer(TEXTS, 400).backend_tokenizer
    backend.add_special_tokens(["<s>"])
    start, end = backend.token_to_id("<s>"), backend.token_to_id(END_OF_TEXT)
    backend.enable_truncation(3)  # as some tokenizer.json files ask for
    for template, name in [("<s> $A", "bos"), (f"<s> $A {END_OF_TEXT}", "both")]:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", start), (END_OF_TEXT, end)]
        )
        folder = tmp_path / name
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, bos_token="<s>")
        fast.save_pretrained(folder)
        folder.joinpath("out").mkdir()
        ids = one_document_ids(folder / "out", folder, TEXTS[0])
        bare = load_tokenizer(str(folder))(TEXTS[0], add_special_tokens=False, truncation=False).input_ids
        assert ids == [start, *bare, end]


def test_a_tokenizer_without_a_fast_version(tmp_path):
    import transformers

    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    assert not load_tokenizer(str(tmp_path / "byt5")).is_fast
    # ByT5: the bytes, shifted by the three special tokens, and </s>, which it adds by itself.
    assert one_document_ids(tmp_path, tmp_path / "byt5", "hé") == [b + 3 for b in "hé".encode()] + [1]


@pytest.mark.parametrize("size, dtype", [(65499, np.uint16), (65500, np.int32), (70000, np.int32)])
def test_the_ids_of_large_vocabularies(size, dtype, tmp_path):
    import tokenizers
    import transformers
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    vocabulary = {"</s>": 0} | {f"w{i}": i for i in range(1, size - 1)} | {"a": size - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "t")
    assert one_document_ids(tmp_path, tmp_path / "t", f"w1 w{size - 2} a") == [1, size - 2, size - 1, 0]
    assert IndexedDataset(str(tmp_path / "one")).index.dtype == dtype


# Hold-out


def test_validation_documents_are_held_out_by_their_text(tmp_path, capsys):
    texts = [f"document {i} " + "abc xyz " * (i % 7) for i in range(400)]
    (tmp_path / "a.jsonl").write_text(lines(texts + texts[:100]))
    prefix = tmp_path / "out"
    prores(
        *("--input", tmp_path / "a.jsonl", "--output", prefix),
        *("--train-tokenizer", 320, "--validation-fraction", 0.2),
    )
    assert f"--train-data-path {prefix}-train --valid-data-path {prefix}-valid" in capsys.readouterr().out
    train, valid = (texts_of(f"{prefix}-{part}", f"{prefix}-tokenizer") for part in ("train", "valid"))
    assert 50 < len(set(valid)) < 110
    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(texts + texts[:100])
    # The tokenizer has not seen the validation documents.
    learned = load_tokenizer(f"{prefix}-tokenizer").get_vocab()
    assert learned == train_tokenizer([text for text in texts + texts[:100] if text in set(train)], 320).get_vocab()
    assert learned != train_tokenizer(texts + texts[:100], 320).get_vocab()
    assert not prefix.with_name("out.idx").exists()


@pytest.mark.parametrize(("fraction", "which"), [(1e-9, "validation"), (1 - 1e-9, "training")])
def test_a_part_without_documents_is_refused_before_the_work(fraction, which, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS))
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: pytest.fail("it has begun"))
    split = ("--train-tokenizer", 320, "--validation-fraction", fraction)
    with pytest.raises(UserError, match=f"no {which} documents in .*a.jsonl .*; a (larger|smaller) --validation-frac"):
        prores("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", *split)


def test_the_hold_out_grows_with_the_fraction():
    documents = [Document(str(i), "") for i in range(2000)]
    small, large = ({d.text for d in documents if held_out(d, fraction)} for fraction in (0.02, 0.5))
    assert small < large and 15 < len(small) < 75 and 900 < len(large) < 1100


# Processes


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    texts = [f"{i} " + TEXTS[i % 5] * (i % 50) for i in range(1500)]
    (tmp_path / "a.jsonl").write_text(lines(texts))
    written = []
    for workers in (1, 2, 3):
        prefix = tmp_path / f"w{workers}"
        prores(
            *("--input", tmp_path / "a.jsonl", "--output", prefix, "--workers", workers),
            *("--train-tokenizer", 500, "--validation-fraction", 0.1),
        )
        files = ("-train.bin", "-train.idx", "-valid.bin", "-valid.idx", "-tokenizer/tokenizer.json")
        written.append([Path(f"{prefix}{file}").read_bytes() for file in files])
    assert len(written[0][0]) > 100_000
    assert written[1] == written[0] and written[2] == written[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_only_a_few_batches_are_read_ahead(workers, tokenizer):
    unread = iter(range(1000))

    def documents():
        for _ in unread:
            yield Document("word " * 20_000, "here"), 0

    encoded = encode_documents(Encoder.of(tokenizer, np.uint16), documents(), workers)
    next(encoded)
    encoded.close()
    assert len(list(unread)) > 950


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_is_the_same_line(workers, tmp_path, bpe):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS) + '{"text": "half a pair: \\ud83e"}\n')
    with pytest.raises(UserError) as error:
        prores("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", bpe, "--workers", workers)
    expected = f"{tmp_path}/a.jsonl line 6: not valid Unicode (surrogates not allowed, character 14)"
    assert str(error.value) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_a_worker_that_dies_is_one_line(tokenizer):
    documents = ((Document(TEXTS[0] * 100, "here"), 0) for _ in range(100_000))
    encoded = encode_documents(Encoder.of(tokenizer, np.uint16), documents, 2)
    next(encoded)
    workers = [child.pid for child in multiprocessing.active_children()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises(UserError, match="a tokenizing process died"):
        list(encoded)
    assert not any(map(running, workers))


def test_interrupt_ends_every_process_and_cleans_up(tmp_path, bpe):
    """Ctrl-C in a terminal: every process of the group gets the signal, here in the middle of a long document."""
    (tmp_path / "long.txt").write_text(TEXTS[0] * 400_000)
    command = [sys.executable, "-m", "megatron_prores.cli", "prepare-data", "--input", str(tmp_path / "long.txt")]
    command += ["--output", str(tmp_path / "out"), "--tokenizer", str(bpe), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: process.poll() is not None or len(children(process.pid)) >= 3)
        time.sleep(2)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    wait_for(lambda: not any(map(running, workers)))
    assert process.stderr.read() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


def test_a_killed_run_leaves_no_dataset_and_the_next_one_cleans_up(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_text(lines([TEXTS[0] * 400] * 4000))  # minutes of work for this tokenizer
    command = [
        sys.executable,
        "-m",
        "megatron_prores.cli",
        "prepare-data",
        "--output",
        str(tmp_path / "out"),
        "--workers",
    ]
    command += ["2", "--tokenizer", str(bpe), "--input"]
    process = subprocess.Popen([*command, str(tmp_path / "a.jsonl")], stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".out.partial" / "out.bin"
    try:
        wait_for(lambda: process.poll() is not None or (partial.exists() and partial.stat().st_size > 0))
        assert process.poll() is None, process.stderr.read()
        with pytest.raises(UserError, match="another prepare-data is writing"):
            prores("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", bpe)
        workers = children(process.pid)
        assert len(workers) >= 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "a.jsonl"]
    wait_for(lambda: not any(map(running, workers)))

    # Megatron's and torch's warnings are not the user's concern. (Python notes that the kill leaked semaphores.)
    assert [line for line in process.stderr if "resource_tracker" not in line] == []

    (tmp_path / "b.jsonl").write_text(lines(TEXTS))
    prores("--input", tmp_path / "b.jsonl", "--output", tmp_path / "out", "--tokenizer", bpe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out.bin", "out.idx"]
    assert texts_of(tmp_path / "out", bpe) == TEXTS


# Outputs


def test_overwrite(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS))
    (tmp_path / "b.jsonl").write_text(lines(TEXTS[:2]))
    command = ["--output", tmp_path / "new" / "out", "--train-tokenizer", 300, "--input"]
    prores(*command, tmp_path / "a.jsonl")
    (tmp_path / "new" / "out-tokenizer" / "old.txt").write_text("of the former run")
    with pytest.raises(UserError, match=r"new/out\.bin exists already; --overwrite replaces it"):
        prores(*command, tmp_path / "b.jsonl")
    assert texts_of(tmp_path / "new" / "out", tmp_path / "new" / "out-tokenizer") == TEXTS
    prores(*command, tmp_path / "b.jsonl", "--overwrite")
    assert texts_of(tmp_path / "new" / "out", tmp_path / "new" / "out-tokenizer") == TEXTS[:2]
    assert not (tmp_path / "new" / "out-tokenizer" / "old.txt").exists()
    # A run that fails leaves the old outputs alone.
    (tmp_path / "b.jsonl").write_text(lines(TEXTS[:1]) + "{")
    with pytest.raises(UserError, match="line 2"):
        prores(*command, tmp_path / "b.jsonl", "--overwrite")
    assert texts_of(tmp_path / "new" / "out", tmp_path / "new" / "out-tokenizer") == TEXTS[:2]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out-tokenizer", "out.bin", "out.idx"]


@pytest.mark.parametrize("calls", range(5))
def test_an_index_appears_only_when_all_else_is_there(calls, tmp_path, monkeypatch):
    """Interrupted before each of its renames, `publish` leaves no index of an incomplete dataset, old or new."""
    names = ["out-train.bin", "out-train.idx", "out-valid.bin", "out-valid.idx", "out-tokenizer"]
    for folder in (tmp_path / ".out.partial", tmp_path):
        (folder / "out-tokenizer").mkdir(parents=True)
        for name in names[:4]:
            (folder / name).write_text(folder.name)
    rename, left = os.replace, iter(range(calls))

    def replace(*paths):
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(*paths)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / ".out.partial", tmp_path, names)
    indices = list(tmp_path.glob("*.idx"))
    assert len(indices) == max(0, calls - 3)
    for name in names[0::2] + [path.name for path in indices] if indices else []:
        assert (tmp_path / name).is_dir() or (tmp_path / name).read_text() == ".out.partial"


def test_the_report_counts(tmp_path, capsys, bpe):
    (tmp_path / "a.jsonl").write_text(lines([*TEXTS, ""]))
    prores("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", bpe)
    printed = capsys.readouterr().out
    tokens, size = sum(map(len, read(tmp_path / "out"))), sum(len(text.encode()) for text in TEXTS)
    assert f"5 documents, {tokens} tokens, {size} bytes of text, {tokens / size:.3f} tokens per byte" in printed
    assert "1 empty documents" in printed


def test_the_command_is_cheap_to_import():
    script = "import sys, megatron_prores.commands.prepare_data; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "megatron.core", "transformers", "datasets", "tokenizers", "tqdm"} & set(modules)


# Errors

BAD_FILES = {
    "syntax.jsonl": (
        lines(TEXTS) + '{"text": oops}\n',
        "syntax.jsonl line 6: not valid JSON (Expecting value, column 10)",
    ),
    "array.json": ('["a"]', "array.json line 1: a JSON array, not an object like {'text': ...}"),
    "key.jsonl": (
        lines(["a"]) + '{"txt": "b"}',
        "key.jsonl line 2: no key 'text' (keys: 'txt'); --json-key names the key",
    ),
    "number.jsonl": ('\n{"text": 3}', "number.jsonl line 2: 'text' is number, not a string"),
    "null.jsonl": ('{"text": null}', "null.jsonl line 1: 'text' is null, not a string"),
    "deep.jsonl": ("[" * 200_000, "deep.jsonl line 1: not readable JSON ("),
    "latin1.jsonl": (b'{"text": "caf\xe9"}', "latin1.jsonl line 1: not UTF-8 ("),
    "latin1.txt": (b"caf\xe9", "latin1.txt: not UTF-8 text ("),
    "syntax.jsonl.gz": (
        gzip.compress(b'{"text": "a"}\nx'),
        "syntax.jsonl.gz line 2: not valid JSON (Expecting value, ",
    ),
    "plain.jsonl.gz": (lines(TEXTS), "plain.jsonl.gz: damaged .gz data (Not a gzipped file"),
    "short.jsonl.gz": (gzip.compress(lines(TEXTS).encode())[:-12], "short.jsonl.gz: damaged .gz data ("),
    "plain.txt.zst": (TEXTS[0], "plain.txt.zst: damaged .zst data ("),
    "short.txt.zst": (lambda: zstd(os.urandom(1000))[:-5], "short.txt.zst: damaged .zst data (it ends in the middle"),
    "broken.parquet": ("PAR1 and no more", "broken.parquet: not a readable parquet file ("),
    "a.parquet.gz": ("", "a.parquet.gz: a parquet file is compressed inside; decompress it first"),
    "empty.jsonl": ("", "no documents in "),
    "blank.txt": (" \n", "and 1 empty documents left out)"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("train", [False, True])
def test_unusable_files_are_one_line(name, train, tmp_path, bpe):
    content, message = BAD_FILES[name]
    content = content() if callable(content) else content
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    tokenizer = ("--train-tokenizer", 300) if train else ("--tokenizer", bpe)
    with pytest.raises(UserError) as error:
        prores("--input", tmp_path / name, "--output", tmp_path / "out", *tokenizer)
    assert message in str(error.value)
    assert str(error.value).count(str(tmp_path / name)) == 1
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_parquet_columns(tmp_path, bpe):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["a", None]}), path)
    for key, message in [
        ("body", "no column 'body' (columns: 'n', 'text')"),
        ("n", "column 'n' holds int64, not strings"),
        ("text", "a.parquet row 2: 'text' is null, not a string"),
    ]:
        with pytest.raises(UserError) as error:
            prores("--input", path, "--output", tmp_path / "out", "--tokenizer", bpe, "--json-key", key)
        assert message in str(error.value)


def test_damage_in_the_middle_of_a_parquet_file(tmp_path, bpe):
    write_parquet(tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4 : len(content) // 3] = os.urandom(len(content) // 3 - 4)  # the footer, which says what is where, is whole
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read after row 0 \("):
        prores("--input", tmp_path / "a.parquet", "--output", tmp_path / "out", "--tokenizer", bpe)


def test_bad_arguments(tmp_path, bpe):
    import transformers

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    without_eos = train_tokenizer(TEXTS, 300)
    transformers.PreTrainedTokenizerFast(tokenizer_object=without_eos.backend_tokenizer).save_pretrained(
        tmp_path / "no_eos"
    )
    good = {"--input": tmp_path / "a.txt", "--output": tmp_path / "out", "--tokenizer": bpe}
    cases = [
        ({"--input": tmp_path / "none.jsonl"}, "none.jsonl: no such file or folder"),
        ({"--input": "none.txt.gz"}, "none.txt.gz: no such file or folder"),
        ({"--input": tmp_path / "folder"}, "no documents in"),
        ({"--input": "/dev/null"}, "/dev/null: neither a file nor a folder"),
        ({"--input": ""}, "--input holds an empty name"),
        ({"--output": tmp_path / "a.txt" / "out"}, "cannot write in"),
        ({"--output": "/proc/nowhere/out"}, "cannot write in /proc/nowhere"),
        ({"--output": f"{tmp_path}/folder/"}, "is a folder; give a path prefix, such as"),
        ({"--tokenizer": tmp_path / "none"}, "none: no such folder"),
        ({"--tokenizer": "configs/none"}, "configs/none: no such folder"),
        ({"--tokenizer": tmp_path / "folder"}, "folder: neither a folder nor a name that loads ("),
        ({"--tokenizer": tmp_path / "no_eos"}, "it has no EOS token, which ends each document"),
        ({"--tokenizer": None, "--train-tokenizer": 256}, "needs 257 tokens or more, not 256"),
        ({"--tokenizer": None, "--train-tokenizer": 300, "--output": f"{tmp_path}/\udcff"}, "a path that is not UTF-8"),
        ({"--tokenizer": None}, "--tokenizer --train-tokenizer is required"),
        ({"--train-tokenizer": 300}, "not allowed with argument"),
        ({"--workers": 0}, "--workers must be at least 1"),
        ({"--validation-fraction": 1.0}, "--validation-fraction must be between 0 and 1"),
        ({"--validation-fraction": 1e-9}, "no validation documents in"),
    ]
    for change, message in cases:
        arguments = {key: value for key, value in (good | change).items() if value is not None}
        with pytest.raises(UserError) as error:
            prores(*(word for pair in arguments.items() for word in pair))
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


def test_a_missing_package_is_named(tmp_path, bpe, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what Python does where a package is not installed
    with pytest.raises(UserError, match=r"needs zstandard.*pip install 'megatron_prores\[hf\]'"):
        prores("--input", tmp_path / "a.txt.zst", "--output", tmp_path / "out", "--tokenizer", bpe)


def test_an_error_on_the_command_line_has_no_traceback(tmp_path):
    command = [sys.executable, "-m", "megatron_prores.cli", "prepare-data", "--input", "none.jsonl", "--output"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), "--train-tokenizer", "300"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none.jsonl: no such file or folder\n"
