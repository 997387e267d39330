"""Differences between ComfyUI versions, asked and answered without starting one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phase_parallel.launch.errors import LaunchError
from phase_parallel.launch.host import (
    PACK_LINK_NAME,
    ComfyHost,
    RankPlace,
    describe_host,
    make_base,
    patched_user_folder,
    rank_arguments,
    rank_environment,
    reachable_address,
    split_extra_flags,
    write_model_paths,
)

OLD_FLAGS = frozenset(
    {"--port", "--cpu", "--listen", "--temp-directory", "--output-directory", "--input-directory"}
)
NEW_FLAGS = OLD_FLAGS | {
    "--base-directory",
    "--user-directory",
    "--database-url",
    "--disable-api-nodes",
    "--disable-all-custom-nodes",
    "--whitelist-custom-nodes",
}


def host(
    root: Path, flags: frozenset[str], *, private: bool = False, linked_as: str | None = None
) -> ComfyHost:
    return ComfyHost(root, "a test", private, linked_as, "1.2.3", flags)


def place(tmp_path: Path, rank: int) -> RankPlace:
    return RankPlace(rank, 8000 + rank, "cpu", tmp_path / f"rank{rank}", tmp_path / "base")


def value_of(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1, f"{flag} in {words}"
    return words[words.index(flag) + 1]


def test_no_rank_is_given_a_flag_that_its_host_lacks(tmp_path: Path) -> None:
    for flags in (OLD_FLAGS, NEW_FLAGS):
        for linked_as in (None, "my-pack"):
            for rank in (0, 1):
                words = rank_arguments(
                    host(tmp_path, flags, linked_as=linked_as), place(tmp_path, rank), [], None
                )
                assert {word for word in words if word.startswith("--")} <= flags | {"--dont-print-server"}


@pytest.mark.parametrize("flags", [OLD_FLAGS, NEW_FLAGS], ids=["of 2024", "modern"])
@pytest.mark.parametrize("linked_as", [None, "my-pack"], ids=["private base", "in place"])
def test_other_ranks_write_only_into_their_own_folder(
    tmp_path: Path, flags: frozenset[str], linked_as: str | None
) -> None:
    some_host = host(tmp_path, flags, linked_as=linked_as)
    there = place(tmp_path, 2)
    words = rank_arguments(some_host, there, [], None)
    assert value_of(words, "--listen") == "127.0.0.1"
    for flag in ("--temp-directory", "--output-directory"):
        assert Path(value_of(words, flag)).is_relative_to(there.own)
    if "--user-directory" in flags:
        assert Path(value_of(words, "--user-directory")).is_relative_to(there.own)
        assert str(there.own) in value_of(words, "--database-url")
        assert value_of(words, "--whitelist-custom-nodes") == (linked_as or PACK_LINK_NAME)
        assert patched_user_folder(some_host, there) is None
    else:
        assert patched_user_folder(some_host, there) == there.own / "user"


def test_rank_0_in_place_keeps_the_folders_of_its_host(tmp_path: Path) -> None:
    words = rank_arguments(host(tmp_path, NEW_FLAGS, linked_as="my-pack"), place(tmp_path, 0), [], None)
    assert not {"--output-directory", "--user-directory", "--database-url", "--base-directory"} & set(words)


def test_rank_0_elsewhere_uses_the_base_folder(tmp_path: Path) -> None:
    there = place(tmp_path, 0)
    modern = rank_arguments(host(tmp_path, NEW_FLAGS), there, [], None)
    assert value_of(modern, "--base-directory") == str(there.base)
    # The default database of 0.3.64 lies in the host's own folder, whatever --base-directory says.
    assert str(there.base) in value_of(modern, "--database-url")
    old = rank_arguments(host(tmp_path, OLD_FLAGS), there, [], None)
    assert value_of(old, "--output-directory") == str(there.base / "output")
    assert value_of(old, "--input-directory") == str(there.base / "input")


def test_cpu_flag_follows_the_device(tmp_path: Path) -> None:
    there = place(tmp_path, 0)
    assert "--cpu" in rank_arguments(host(tmp_path, OLD_FLAGS), there, [], None)
    there = RankPlace(0, 8000, "cuda", tmp_path, tmp_path)
    assert "--cpu" not in rank_arguments(host(tmp_path, OLD_FLAGS), there, [], None)


def test_ranks_on_gpus_use_pytorchs_own_allocator(tmp_path: Path) -> None:
    """ComfyUI's default, CUDA's asynchronous one, is not what graphs and peers' memory are made with."""
    knows = host(tmp_path, OLD_FLAGS | {"--disable-cuda-malloc"})
    on_gpu = RankPlace(0, 8000, "cuda", tmp_path, tmp_path)
    assert "--disable-cuda-malloc" in rank_arguments(knows, on_gpu, [], None)
    assert "--disable-cuda-malloc" not in rank_arguments(knows, place(tmp_path, 0), [], None)
    assert "--disable-cuda-malloc" not in rank_arguments(host(tmp_path, OLD_FLAGS), on_gpu, [], None)


def test_models_of_a_users_comfyui_stay_selectable(tmp_path: Path) -> None:
    (tmp_path / "models" / "loras").mkdir(parents=True)
    written = write_model_paths(host(tmp_path, NEW_FLAGS), tmp_path / "base", tmp_path / "paths.yaml")
    assert written is not None
    assert json.loads(written.read_text()) == {
        "phase_parallel": {"loras": str(tmp_path / "models" / "loras")}
    }
    assert (
        write_model_paths(host(tmp_path, NEW_FLAGS, private=True), tmp_path, tmp_path / "none.yaml") is None
    )
    assert (
        write_model_paths(host(tmp_path, NEW_FLAGS, linked_as="x"), tmp_path, tmp_path / "none.yaml") is None
    )


def test_a_host_without_base_directory_finds_the_pack_through_the_paths_file(tmp_path: Path) -> None:
    written = write_model_paths(host(tmp_path, OLD_FLAGS), tmp_path / "base", tmp_path / "paths.yaml")
    assert written is not None
    assert json.loads(written.read_text())["phase_parallel"]["custom_nodes"] == str(
        tmp_path / "base" / "custom_nodes"
    )


def test_base_links_the_pack_and_refuses_a_folder_in_its_place(tmp_path: Path) -> None:
    base, pack = tmp_path / "base", tmp_path / "pack"
    pack.mkdir()
    for _ in range(2):  # a second launch finds its link there
        make_base(host(tmp_path, NEW_FLAGS), base, pack)
    link = base / "custom_nodes" / PACK_LINK_NAME
    assert link.resolve() == pack
    link.unlink()
    link.mkdir()
    with pytest.raises(LaunchError, match="not a link of ours"):
        make_base(host(tmp_path, NEW_FLAGS), base, pack)


def test_a_users_comfyui_gets_no_byte_code(tmp_path: Path) -> None:
    assert rank_environment(host(tmp_path, NEW_FLAGS)) == {"PYTHONDONTWRITEBYTECODE": "1"}
    assert rank_environment(host(tmp_path, NEW_FLAGS, private=True)) == {}


def test_describe_host_asks_for_flags_version_and_the_pack(any_stand_in: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    found = describe_host(any_stand_in, origin="x", private=False, pack_root=pack)
    assert found.knows("--temp-directory") and not found.knows("--no-such-flag")
    assert found.version == "older than 0.3" and not found.in_place
    (any_stand_in / "custom_nodes").mkdir()
    (any_stand_in / "custom_nodes" / "linked").symlink_to(pack)
    (any_stand_in / "comfyui_version.py").write_text('# generated\n__version__ = "0.9.1"\n')
    found = describe_host(any_stand_in, origin="x", private=False, pack_root=pack)
    assert found.linked_as == "linked" and found.version == "0.9.1"


def test_extra_flags_are_checked_and_divided(stand_in: Path) -> None:
    some_host = describe_host(stand_in, origin="x", private=False, pack_root=stand_in)
    first, others = split_extra_flags(some_host, ["--listen", "0.0.0.0", "--preview-method=auto"])
    assert first == ["--listen", "0.0.0.0", "--preview-method", "auto"]
    assert others == ["--preview-method", "auto"]
    for words, sentence in (
        (["--bogus"], "has no flag --bogus"),
        (["--port", "1"], "use `up --port`"),
        (["word"], "not a ComfyUI flag"),
        (["--preview-method", "no"], "refuses its flags.*invalid choice"),
    ):
        with pytest.raises(LaunchError, match=sentence):
            split_extra_flags(some_host, words)


def test_reachable_address() -> None:
    assert reachable_address([]) == "127.0.0.1"
    assert reachable_address(["--listen"]) == "127.0.0.1"
    assert reachable_address(["--listen", "--cpu"]) == "127.0.0.1"
    assert reachable_address(["--listen", "0.0.0.0,::"]) == "127.0.0.1"
    assert reachable_address(["--listen", "10.1.2.3"]) == "10.1.2.3"
