"""The vision tower's training: it learns, a seed repeats it, its tensors are the checkpoint's, and its targets are where the shapes are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.models.hunyuan_image_3.reference_images import vit_patches
from phase_parallel.train.drawing import render
from phase_parallel.train.loop import LossLog, read_log
from phase_parallel.train.mini import mini_config
from phase_parallel.train.scenes import COLOURS, PALETTE, random_scene, size_of
from phase_parallel.train.tower_training import NOTHING, Described, PoolingHead, SceneEncoder, Seen, Sides, TowerRecipe, TrainedTower, score_tower, train_tower

CPU = torch.device("cpu")
CONFIG, _ = mini_config("instruct", 1.0)
VIT = CONFIG.vit


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[dict]]:
    """Two runs of one seed, and the first one's log."""
    folder, recipe = tmp_path_factory.mktemp("tower"), TowerRecipe(steps=24, batch=16, pictures=32)
    made = [train_tower(VIT, recipe, device=CPU, seed=4, log=LossLog(folder / f"{run}.jsonl", every=4)) for run in range(2)]
    return made, read_log(folder / "0.jsonl")


def test_training_lowers_both_losses(twice) -> None:
    lines = twice[1]
    assert lines[-1]["sigmoid"] < 0.8 * lines[0]["sigmoid"] and lines[-1]["patches"] < 0.8 * lines[0]["patches"]


def test_a_seed_repeats_the_training(twice) -> None:
    one, other = twice[0]
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_it_hands_over_all_of_the_checkpoints_tower(twice) -> None:
    shapes = {key: shape for key, shape in checkpoint_shapes(CONFIG).items() if key.startswith("vision_model.")}
    assert {key: tuple(tensor.shape) for key, tensor in twice[0][0].items()} == shapes


def test_a_patch_is_named_after_the_object_that_covers_it() -> None:
    """By its colour: what a solid shape's middle shows is what the target says."""
    seen = Seen.draw(range(60), VIT, unseen=False)
    named, right = 0, 0
    for number in range(60):
        scene = random_scene(number, unseen=False)
        middles = seen.patches[number].view(-1, 16, 16, 3)[:, 8, 8].float()
        for place, thing in enumerate(scene.objects):
            off = (middles[seen.covers[number] == place] - torch.tensor(PALETTE[thing.colour])).abs().amax(1)
            if thing.kind == "square":
                named, right = named + len(off), right + int((off < 25).sum())
    assert named > 60 and right > 0.75 * named


def test_every_object_covers_a_patch() -> None:
    """A small one too, which may lie between the middles of four."""
    seen = Seen.draw(range(60), VIT, unseen=False)
    counts = [len(random_scene(number, unseen=False).objects) for number in range(60)]
    covering = [len(set(row.tolist()) - {NOTHING}) for row in seen.covers]
    assert covering == counts


def test_descriptions_hold_names_in_order_and_nothing_for_the_rest() -> None:
    scene = random_scene(5, unseen=False, count=2)
    described = Described.of([scene])
    assert described.objects.shape == (1, 3, 4) and (described.objects[0, 2] == NOTHING).all()
    assert [COLOURS[i] for i in described.objects[0, :2, 1]] == [thing.colour for thing in scene.objects]


def test_stored_patches_are_exact() -> None:
    scene = random_scene(7, unseen=False)
    patches, mask, grid = vit_patches(render(scene, *size_of(scene.aspect), 7), VIT)
    seen = Seen.draw([7], VIT, unseen=False)
    got: list[torch.Tensor] = []
    seen.features(lambda pixels, mask, grids: got.append(pixels))
    torch.testing.assert_close(got[0][0], patches, atol=1e-6, rtol=0)
    assert seen.grids == (grid,) and torch.equal(seen.mask[0], mask)


def test_the_head_does_not_look_at_empty_slots() -> None:
    head = PoolingHead(VIT)
    features, mask = torch.randn(2, 64, VIT.hidden_size), torch.arange(64).expand(2, -1) < 60
    changed = torch.where(mask[..., None], features, features + 5)
    torch.testing.assert_close(head(features, mask), head(changed, mask))
    assert not torch.allclose(head(features, torch.ones_like(mask)), head(changed, torch.ones_like(mask)))


def test_a_description_is_a_set_of_objects() -> None:
    """Their order in the list does not matter, who has which colour does."""
    scenes = SceneEncoder(16)
    one = Described.of([random_scene(5, unseen=False, count=2)])
    swapped = Described(one.objects[:, [1, 0, 2]], one.background, one.aspect)
    mixed = one.objects.clone()
    mixed[0, :2, 1] = one.objects[0, [1, 0], 1]
    assert mixed[0, 0, 1] != one.objects[0, 0, 1]
    torch.testing.assert_close(scenes(one), scenes(swapped))
    assert not torch.allclose(scenes(one), scenes(Described(mixed, one.background, one.aspect)))


def test_an_untrained_tower_scores_near_chance() -> None:
    torch.manual_seed(0)
    score = score_tower(TrainedTower(VIT), Sides(VIT.hidden_size), VIT, groups=1, seed=0)
    assert score.retrieval < 0.1 and all(0 <= share < 0.5 for share in score.patches.values())


def test_a_scaled_recipe_has_at_least_one_batch(tmp_path: Path) -> None:
    short = TowerRecipe().scaled(0.0001)
    assert short.steps == 1 and short.pictures == short.batch
