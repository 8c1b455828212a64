"""Downloads from a server of our own: whole, broken off, wrong, at the same time, or not at all."""

import gzip
import http.server
import threading

import pytest
import torch

from clipless.data import SOURCES, DataNotFoundError, load, split_rows
from clipless.data.sources._download import DownloadBar, DownloadFailedError, fetch
from tests.data.files import idx_source, npz_bytes, published, table_source


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `cut[name]` lists after how many bytes its next answers break off."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.cut, self.requests = {}, {}, []
        self.ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        asked = self.headers.get("Range")
        self.server.requests.append((name, asked))
        if name not in self.server.files:
            return self.send_error(404)
        body, start = self.server.files[name], 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return self.send_error(416)
        cuts = self.server.cut.get(name, [])
        end = cuts.pop(0) if cuts else len(body)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        return self.wfile.write(body[start:end])


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


BODY = bytes(range(256)) * 40


def get(server, tmp_path, *, serve=BODY, expect=BODY, urls=None, check=lambda part: None):
    server.files.setdefault("a.bin", serve)
    file, _ = published("a.bin", expect, urls or (f"{server.url}/a.bin",))
    with DownloadBar(False) as bar:
        bar.begin(file.name)
        fetch(file, tmp_path / "a.bin", bar=bar, check=check)


def test_a_file_arrives(server, tmp_path):
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert server.requests == [("a.bin", None)]


def test_a_broken_connection_is_resumed(server, tmp_path):
    server.cut["a.bin"] = [3000, 7000]
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [asked for _, asked in server.requests] == [None, "bytes=3000-", "bytes=7000-"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.ranges, server.cut["a.bin"] = False, [3000]
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_truncated_download_never_appears_and_is_resumed_later(server, tmp_path):
    server.cut["a.bin"] = [1000, 2000, 3000]
    with pytest.raises(DownloadFailedError, match=r"a.bin: .*ended after 3,000 of 10,240 bytes"):
        get(server, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin.part"]
    server.requests.clear()
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert server.requests == [("a.bin", "bytes=3000-")]


@pytest.mark.parametrize("left", [b"something else", BODY, BODY + b"more"])
def test_a_damaged_remainder_is_overcome(server, tmp_path, left):
    (tmp_path / "a.bin.part").write_bytes(left)
    get(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert not (tmp_path / "a.bin.part").exists()


def test_a_wrong_checksum_is_refused(server, tmp_path):
    with pytest.raises(
        DownloadFailedError, match=r"a.bin: the download has checksum sha256:\w+, exp"
    ):
        get(server, tmp_path, serve=BODY[::-1])
    assert list(tmp_path.iterdir()) == []


def test_an_endless_answer_is_refused(server, tmp_path):
    with pytest.raises(DownloadFailedError, match="sends more than 20,608 bytes"):
        get(server, tmp_path, serve=BODY * 3)
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried(server, tmp_path):
    server.files["wrong.bin"] = BODY[::-1]
    urls = (
        "http://127.0.0.1:9/a.bin",
        f"{server.url}/none.bin",
        f"{server.url}/wrong.bin",
        f"{server.url}/a.bin",
    )
    get(server, tmp_path, urls=urls)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DownloadFailedError) as failed:
        get(server, tmp_path, urls=urls[:3])
    lines = str(failed.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == list(urls[:3])
    assert "refused" in lines[0]
    assert "404" in lines[1]
    assert "checksum" in lines[2]


def test_a_data_set_is_downloaded_once(server, tmp_path, monkeypatch, capfd):
    source, files, arrays = idx_source("digits", url=server.url)
    monkeypatch.setitem(SOURCES, "digits", source)
    server.files |= files
    data = load("digits", root=tmp_path, progress=True)
    assert "train-images.gz" in capfd.readouterr().err
    assert data.verified
    assert torch.equal(data.train[0][:, 0], torch.from_numpy(arrays[0]) / 255)
    assert len(server.requests) == 4
    load("digits", root=tmp_path)
    (tmp_path / "digits" / "t10k-labels.gz").unlink()
    load("digits", root=tmp_path)
    assert server.requests[4:] == [("t10k-labels.gz", None)]
    assert capfd.readouterr().err == ""


def test_a_mirror_may_compress_differently(server, tmp_path, monkeypatch):
    source, files, _ = idx_source("digits", url=server.url)
    monkeypatch.setitem(SOURCES, "digits", source)
    server.files |= {name: gzip.compress(gzip.decompress(raw), 1) for name, raw in files.items()}
    assert load("digits", root=tmp_path).verified


def test_processes_do_not_download_the_same_file_twice(server, tmp_path, monkeypatch):
    source, files, _ = idx_source("digits", url=server.url)
    monkeypatch.setitem(SOURCES, "digits", source)
    server.files |= files
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(load("digits", root=tmp_path).verified))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert len(server.requests) == 4


def test_without_a_checksum_structure_decides(server, tmp_path, monkeypatch):
    source, files, (x, y) = table_source(urls=(f"{server.url}/a.npz", f"{server.url}/b.npz"))
    monkeypatch.setitem(SOURCES, "people", source)
    server.files |= {"a.npz": b"<html>sign in</html>", "b.npz": npz_bytes(X=x[1:], y=y[1:])}
    with pytest.raises(DataNotFoundError) as failed:
        load("people", root=tmp_path)
    assert "a.npz" in str(failed.value)
    assert "truncated or corrupt .npz" in str(failed.value)
    assert "X has shape (19, 4), expected (20, 4)" in str(failed.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    server.files["b.npz"] = files["people.npz"]
    assert len(load("people", root=tmp_path).train[0]) == len(split_rows(20)[0])


def test_without_a_network_the_files_are_asked_for(tmp_path, monkeypatch):
    source, files, _ = idx_source("digits", url="http://127.0.0.1:9/there")
    monkeypatch.setitem(SOURCES, "digits", source)
    with pytest.raises(DataNotFoundError) as failed:
        load("digits", root=tmp_path)
    text = str(failed.value)
    assert "could not be downloaded:\nhttp://127.0.0.1:9/there/train-images.gz: " in text
    for name in files:
        assert f"  {name}    from http://127.0.0.1:9/there/{name}" in text
    assert f"Put into {tmp_path / 'digits'}:" in text


def test_a_folder_that_cannot_be_written_is_said_to_be(tmp_path, monkeypatch):
    source, _, _ = idx_source("digits")
    monkeypatch.setitem(SOURCES, "digits", source)
    (tmp_path / "digits").write_text("a file where the folder should be")
    with pytest.raises(DataNotFoundError, match=r"cannot be stored there.*File exists"):
        load("digits", root=tmp_path)
