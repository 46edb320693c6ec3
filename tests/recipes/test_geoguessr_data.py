"""The made-up photographs: the same bytes for the same seed, and places that can be told apart."""

import io

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def test_rows_are_those_of_rlhf_training(files):
    import make_data

    table = pa.concat_tables([pq.read_table(path) for path in files])
    assert table.column_names == [
        "data_source",
        "prompt",
        "images",
        "ability",
        "reward_model",
        "extra_info",
    ]
    row = table.slice(41, 1).to_pylist()[0]
    assert row == make_data.make_row(0, "train", 41)
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].count("<image>") == 1
    assert r"\boxed{lat, lon}" in row["prompt"][0]["content"]
    assert row["reward_model"]["style"] == "rule"
    truth = row["reward_model"]["ground_truth"]
    assert abs(truth["lat"]) <= 90
    assert abs(truth["lon"]) <= 180
    sizes = [len(images[0]["bytes"]) for images in table["images"].to_pylist()]
    assert 25_000 < np.mean(sizes) < 35_000
    assert Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (320, 240)


def test_same_bytes_with_one_or_two_processes(recipe, tmp_path):
    import make_data

    sizes = {"rows_per_file": 5, "rows_per_group": 2}
    one = make_data.write_set(tmp_path / "one", 11, 2, seed=5, processes=1, **sizes)
    two = make_data.write_set(tmp_path / "two", 11, 2, seed=5, processes=2, **sizes)
    assert [path.name for path in one["train"]] == [
        f"train-0000{i}-of-00003.parquet" for i in range(3)
    ]
    for split in ("train", "test"):
        assert [p.read_bytes() for p in one[split]] == [p.read_bytes() for p in two[split]]
    groups = pq.ParquetFile(one["train"][0]).metadata
    assert [groups.row_group(i).num_rows for i in range(3)] == [2, 2, 1]
    assert not list(tmp_path.glob("*/*.tmp"))


def test_what_makes_a_row(recipe):
    from make_data import make_row

    row = make_row(1, "train", 3)
    assert row == make_row(1, "train", 3)
    others = [make_row(2, "train", 3), make_row(1, "test", 3), make_row(1, "train", 4)]
    places = {str(other["reward_model"]["ground_truth"]) for other in [row, *others]}
    assert len(places) == 4


def test_a_set_is_not_overwritten_by_mistake(recipe, tmp_path):
    import make_data

    make_data.write_set(tmp_path, 2, processes=1)
    with pytest.raises(FileExistsError, match="--overwrite"):
        make_data.write_set(tmp_path, 1, processes=1)
    make_data.write_set(tmp_path, 1, processes=1, overwrite=True)
    assert pq.read_table(tmp_path).num_rows == 1


def test_an_empty_split_has_no_file(recipe, tmp_path):
    import make_data

    assert make_data.write_set(tmp_path, 0, 1, processes=1)["train"] == []


def test_command(recipe, tmp_path):
    import make_data
    from click.testing import CliRunner

    arguments = [str(tmp_path), "--rows", "3", "--test-rows", "1", "--processes", "1"]
    done = CliRunner().invoke(make_data.main, arguments)
    assert done.exit_code == 0, done.output
    assert "1 train files, 1 test files" in done.output
    again = CliRunner().invoke(make_data.main, [*arguments, "--quiet"])
    assert again.exit_code == 1
    assert "already has" in again.output


class TestPlaces:
    def test_even_over_the_globe(self, recipe):
        import scenes

        rng = np.random.default_rng(0)
        places = [scenes.sample_place(rng) for _ in range(4000)]
        free = [place for place in places if place.landmark is None]
        assert 1 - len(free) / 4000 == pytest.approx(1 / 7, abs=0.03)
        # On a sphere half of the area lies between 30 degrees south and north.
        assert np.mean([abs(p.lat) < 30 for p in free]) == pytest.approx(0.5 / 0.985, abs=0.03)
        assert np.mean([p.lon < 0 for p in free]) == pytest.approx(0.5, abs=0.03)
        assert {p.landmark for p in places if p.landmark} == set(scenes.LANDMARKS)

    @pytest.mark.parametrize(
        ("there", "elsewhere"),
        [
            ((0, 0, 6), (75, 0, 6)),  # rain forest, ice
            ((0, 0, 6), (25, 0, 6)),  # rain forest, desert
            ((55, 0, 1), (55, 0, 7)),  # winter, summer
            ((55, 0, 1), (-55, 0, 1)),  # the other half of the globe has summer
            ((20, -90, 6), (20, 90, 6)),  # walls and furrows
        ],
    )
    def test_far_places_look_different(self, recipe, there, elsewhere):
        """Pictures of one place are nearer to each other than to the other place's mean."""
        import scenes

        def mean_look(place, seeds):
            pictures = [
                scenes.render(scenes.Place(*place, None), np.random.default_rng(seed))
                for seed in seeds
            ]
            small = [p.reshape(12, 20, 16, 20, 3).mean((1, 3)) for p in pictures]
            return np.mean(small, axis=0)

        one, again = mean_look(there, range(6)), mean_look(there, range(6, 12))
        other = mean_look(elsewhere, range(12, 18))
        assert np.abs(one - other).mean() > 1.25 * np.abs(one - again).mean()

    def test_no_seam_at_the_date_line(self, recipe):
        import scenes

        west = scenes.render(scenes.Place(10, -179.999, 5, None), np.random.default_rng(3))
        east = scenes.render(scenes.Place(10, 179.999, 5, None), np.random.default_rng(3))
        assert np.abs(west[:110].astype(int) - east[:110]).mean() < 3
        # Furrows have a direction and no sense: the same waves, wherever they begin.
        waves = [np.abs(np.fft.rfft2(p[110:].mean(2) - p[110:].mean())) for p in (west, east)]
        assert np.corrcoef(waves[0].ravel(), waves[1].ravel())[0, 1] > 0.95
