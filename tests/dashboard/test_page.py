"""The page in headless Chromium. Every test also asserts that the console is empty.

All tests share one server and one browser context, so the 4.8 MB of plotly.js load once.
"""

import json

import pytest

from miniray.dashboard import DashboardServer
from tests.dashboard import synthetic
from tests.dashboard.conftest import Client
from tests.doctor.helpers import Ranks, wait_until

pytestmark = pytest.mark.timeout(300)  # a browser on a crowded machine
LIMIT = 120_000  # milliseconds


# -- the runs -------------------------------------------------------------------------------------


def ended_run(root, name, world=2, losses=None, epochs=30, slower=1.0):
    path = root / name
    synthetic.write_run(path, world, state="finished")
    lines = [{"epoch": n, "loss": 2 / (1 + n / slower), "accuracy": n / 50} for n in range(epochs)]
    synthetic.append_metrics(path, *lines)
    for rank in range(world):
        synthetic.still_rank(path, rank, world, losses=losses)
    return path


def not_finite_run(root):
    path = ended_run(root, "nan", losses=[1.0] * 20 + [float("nan")] * 3 + [1.0] * 27)
    synthetic.append_metrics(path, {"epoch": 30, "loss": "NaN"}, {"epoch": 31, "loss": "Infinity"})


def talking_run(root):
    path = ended_run(root, "talking", world=3)
    for rank in range(3):
        lines = [f"[Rank {rank}/3] step {n}" for n in range(500)]
        lines[250] += " Warning: <img src=x onerror=console.log('broken')>"
        (path / "ranks" / f"{rank}.log").write_text("\n".join(lines) + "\n")


def long_run(root):
    path = root / "long"
    synthetic.write_run(path, 1, state="finished")
    lines = [json.dumps({"step": n, "loss": float(n % 13)}) for n in range(20_000)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def large_run(root):
    path = root / "large"
    synthetic.write_run(path, 64, state="failed")
    for rank in range(64):
        failed = {"kind": "exception", "type": "ValueError", "message": "bad label"}
        synthetic.still_rank(path, rank, 64, steps=5, **(failed if rank == 37 else {}))
    return synthetic.many_points(path / "metrics.jsonl")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dashboard") / "runs"


@pytest.fixture(scope="module")
def alive(root, browser):
    """Ranks that train and ranks that hang, forked before the server starts its threads."""
    found = {"live": Ranks(), "hung": Ranks()}
    synthetic.write_run(root / "live", 2)
    synthetic.write_run(root / "hung", 4, limit=1.0)
    try:
        for rank in range(2):
            found["live"].start(synthetic.train, root / "live", rank, 2)
        for rank in range(4):
            found["hung"].start(synthetic.hang, root / "hung", rank, 4, 2, 3)
        yield found
    finally:
        for ranks in found.values():
            ranks.end()


@pytest.fixture(scope="module")
def client(root, alive):
    ended_run(root, "quick")
    ended_run(root, "slow", slower=5.0, epochs=20)
    ended_run(root, "short", epochs=3)
    for name, rate in (("first", 0.5), ("second", 0.25)):
        path = ended_run(root, name)
        (path / "metrics.jsonl").unlink()
        lines = [{"step": s, "loss": 1 / s, "val_loss": 2 / s, "lr": rate} for s in range(1, 40)]
        synthetic.append_metrics(path, *lines, name="steps.jsonl")
    synthetic.write_run(root / "level", 1, state="finished")
    synthetic.append_metrics(root / "level", *({"epoch": n, "lr": 1e-3} for n in range(3)))
    synthetic.write_run(root / "epochs", 1, state="finished")
    synthetic.still_rank(root / "epochs", 0, 1, steps=0)
    not_finite_run(root)
    talking_run(root)
    long_run(root)
    server = DashboardServer(root, interval=0.3)
    server.start()
    yield Client(server)
    server.close()


@pytest.fixture(scope="module")
def context(browser):
    made = browser.new_context()
    made.set_default_timeout(LIMIT)
    yield made
    made.close()


@pytest.fixture
def open_page(client, context):
    """Return a function that opens the page of a run. Console output fails the test."""
    pages, said = [], []

    def open_run(run, size=(1280, 900), scheme="light"):
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{client.server.url}&run={run}")
        return page

    yield open_run
    for page in pages:
        page.close()
    assert said == []


def text(page, selector):
    return page.locator(selector).first.inner_text()


def until(page, condition):
    """Wait until an expression in the page is true.

    ``wait_for_function`` doesn't work: it calls ``eval``, which the CSP of the page forbids.
    """
    wait_until(lambda: page.evaluate(condition), LIMIT / 1000)


def chart(name, by_rank=False, **fields):
    """Return the selector of a chart with these data attributes."""
    said = "".join(f"[data-{field}='{value}']" for field, value in fields.items())
    return f'.chart[data-chart="{name}{" by rank" if by_rank else ""}"]{said}'


def shown(page, name, field, by_rank=False):
    page.wait_for_selector(f"{chart(name, by_rank)}[data-{field}]")
    return int(page.locator(chart(name, by_rank)).get_attribute(f"data-{field}"))


# -- tests ---------------------------------------------------------------------------------------


def test_page_opens_and_hides_the_token(client, open_page):
    page = open_page("quick")
    page.wait_for_selector(".verdict.healthy")
    assert text(page, "#severity") == "HEALTHY"
    assert text(page, "#sentence") == "2 ranks finished at step 50"
    assert page.url == f"{client.server.address}#run=quick"
    page.wait_for_selector(chart("loss", points=30))
    page.wait_for_selector(chart("loss", by_rank=True, points=100))
    page.reload()  # the cookie lets us in again
    page.wait_for_selector(".verdict.healthy")
    assert page.evaluate("document.cookie") == ""


def test_page_updates_during_training(root, alive, open_page):
    page = open_page("live")
    step = """Number(document.querySelector('tr[data-rank="1"] td.step')?.innerText)"""
    until(page, f"{step} > 0")
    now = page.evaluate(step)
    until(page, f"{step} > {now}")
    for by_rank in (False, True):
        total = shown(page, "loss", "total", by_rank)
        until(page, f"document.querySelector('{chart('loss', by_rank)}').dataset.total > {total}")
    lines = "document.querySelectorAll('#log div').length"
    until(page, f"{lines} > 3")
    now = page.evaluate(lines)
    until(page, f"{lines} > {now}")
    until(page, "document.querySelector('#ranks canvas').ariaLabel?.includes('compute')")
    synthetic.end(root / "live", alive["live"])
    until(page, "document.getElementById('sentence').innerText.includes('2 ranks finished')")


def test_hang_shows_waits_and_stack_of_blocking_rank(root, alive, open_page):
    page = open_page("hung")
    page.wait_for_selector(".verdict.stuck")
    assert "rank 2" in text(page, "#sentence")
    assert page.title().startswith("STUCK · hung")
    page.wait_for_selector("#waits .wait")
    waiting = page.locator("#waits .wait > div").first.locator(".chip")
    assert waiting.all_inner_texts() == ["0", "1", "3"]
    assert page.locator("#waits li .chip").all_inner_texts() == ["2"]
    assert page.locator("#ranks tr.stuck").count() == 1
    until(page, "document.getElementById('log').innerText.includes('vocabulary')")
    assert page.locator("#log-rank").input_value() == "2"
    page.wait_for_selector("#runs .state.stuck")
    page.get_by_role("button", name="Stack of rank 2").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#stack li.user-code")
    assert "a_function_that_takes_long" in text(page, "#stack ol")
    page.keyboard.press("Escape")
    page.wait_for_selector("#rank-dialog", state="hidden")
    synthetic.end(root / "hung", alive["hung"])


def test_non_finite_losses_are_marked(open_page):
    page = open_page("nan")
    page.wait_for_selector(chart("loss", marks=2))
    assert text(page, f"{chart('loss')} .nan").startswith("2 ")
    page.wait_for_selector(chart("loss", by_rank=True, marks=6))
    assert text(page, "#severity") == "WRONG"
    page.locator(f"{chart('loss')} button").click()  # logarithmic
    page.wait_for_selector(f"{chart('loss')} button[aria-pressed='true']")


def test_logs_are_searched_and_shown_as_text(open_page):
    page = open_page("talking")
    lines = "document.querySelectorAll('#log div').length"
    until(page, f"{lines} === 500")
    page.keyboard.press("/")
    page.keyboard.type("warning: <IMG")
    until(page, "document.querySelector('#log mark')?.innerText === 'Warning: <img'")
    assert page.locator("#log mark").count() == 3
    assert text(page, "#log-note") == "3 lines"
    assert page.locator("#log img").count() == 0
    page.locator("#log-everywhere").uncheck()
    until(page, "document.querySelectorAll('#log mark').length === 1")
    page.locator("#log-search").fill("no such words")
    until(page, "document.getElementById('log-note').innerText === '0 lines'")
    page.locator("#log-search").fill("")
    until(page, f"{lines} === 500")
    page.locator("#log-rank").select_option("2")
    until(page, "document.getElementById('log').innerText.startsWith('[Rank 2/3] step 0')")


def test_late_response_is_dropped_after_run_change(open_page):
    page = open_page("quick")
    page.get_by_role("link", name="talking").click()
    until(page, "document.querySelectorAll('#log div').length === 500")
    held = []
    page.route("**/api/search*", lambda route: held.append(route))
    page.locator("#log-search").fill("warning")
    wait_until(lambda: page.evaluate("true") and held)  # the browser's events come with an answer
    page.get_by_role("link", name="quick").click()
    until(page, "document.getElementById('run-name').innerText === 'quick'")
    assert page.locator("#log-search").input_value() == ""
    with page.expect_response("**/api/search*"):
        held[0].continue_()
    until(page, "document.getElementById('log-note').innerText.includes('has no log')")
    assert page.locator("#log mark").count() == 0


@pytest.mark.slow
def test_eight_tabs_load_at_the_same_time(open_page):
    for _ in range(8):
        open_page("quick").wait_for_selector("#ranks tr[data-rank]")


def test_back_button_returns_to_previous_run(open_page):
    page = open_page("quick")
    page.get_by_label("compare slow").check()
    page.get_by_role("link", name="nan").click()
    until(page, "document.getElementById('run-name').innerText === 'nan'")
    assert page.url.endswith("#run=nan&with=slow")
    page.go_back()
    until(page, "document.getElementById('run-name').innerText === 'quick'")
    page.wait_for_selector(chart("loss", runs=2, points=50))


def test_axis_of_few_epochs_has_integer_ticks(open_page):
    page = open_page("short")
    page.wait_for_selector(chart("accuracy", points=3))
    marks = "[...document.querySelectorAll('[data-chart=\"accuracy\"] .xtick')]"
    until(page, f"{marks}.map((tick) => tick.textContent).join() === '0,1,2'")


def test_compared_runs_share_charts_with_legend(open_page):
    page = open_page("quick")
    page.wait_for_selector(chart("loss", points=30))
    page.get_by_label("compare slow").check()
    page.wait_for_selector(chart("loss", runs=2, points=50))
    names = page.locator(f"{chart('loss')} .legend span")
    assert names.all_inner_texts() == ["quick", "slow"]
    by_rank = page.locator(f"{chart('loss', by_rank=True)} .legend span")
    until(page, f"document.querySelector('{chart('loss', by_rank=True)}').dataset.runs === '2'")
    assert by_rank.all_inner_texts() == ["quick", "slow"]
    address = page.url
    assert "with=slow" in address
    page.goto("about:blank")
    page.goto(address)  # a comparison can be kept as a bookmark
    page.wait_for_selector(chart("loss", runs=2))
    page.get_by_label("compare slow").uncheck()
    page.wait_for_selector(chart("loss", runs=1, points=30))
    page.get_by_role("link", name="slow").click()
    page.wait_for_selector(chart("loss", points=20))
    assert text(page, "#run-name") == "slow"


def test_constant_is_text(open_page):
    page = open_page("level")
    until(page, "document.querySelector('#constants').textContent === 'Constant: lr 0.001'")
    assert page.locator(chart("lr")).count() == 0


def test_training_and_validation_share_a_chart(open_page):
    page = open_page("first")
    page.wait_for_selector(chart("loss", points=78))
    assert page.locator(f"{chart('loss')} .legend span").all_inner_texts() == ["loss", "val_loss"]
    assert page.locator(chart("val_loss")).count() == 0
    page.get_by_label("compare second").check()
    page.wait_for_selector(chart("loss", runs=2, points=156))
    names = page.locator(f"{chart('loss')} .legend span").all_inner_texts()
    assert names == ["first", "second", "loss solid, val_loss dashed"]
    assert text(page, "#constants") == "Constant: lr 0.5 (first), lr 0.25 (second)"


def test_zooming_fetches_more_points(open_page):
    page = open_page("long")
    page.wait_for_selector(chart("loss", total=20_000))
    assert shown(page, "loss", "points") <= 2000
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [100, 600]})")
    page.wait_for_selector(chart("loss", points=503))  # all of them, and a neighbour on either side


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_on_a_phone(open_page, scheme):
    page = open_page("quick", size=(390, 844), scheme=scheme)
    page.wait_for_selector(".verdict.healthy")
    page.locator("#charts-section").scroll_into_view_if_needed()
    page.wait_for_selector(chart("loss", points=30))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(15, 18, 22)") is (scheme == "dark")


def test_rank_without_steps_shows_its_epoch(open_page):
    page = open_page("epochs", size=(390, 844))
    cell = page.locator('tr[data-rank="0"] td.step')
    cell.wait_for()
    before = cell.evaluate("cell => getComputedStyle(cell, '::before').content")
    assert (cell.inner_text(), before) == ("epoch 3", "none")


def test_64_ranks_and_a_million_points(root, client, open_page):
    points = large_run(root)
    assert points > 1_000_000
    page = open_page("large")
    sizes = []
    page.on("requestfinished", lambda r: sizes.append(r.sizes()["responseBodySize"]))
    page.wait_for_selector(".verdict.failed")
    assert "rank 37" in text(page, "#sentence")
    assert page.locator("#ranks tbody tr").count() == 16
    assert page.locator("#ranks tbody tr").first.get_attribute("data-rank") == "37"  # trouble first
    assert page.locator("#rank-map .chip.failed").all_inner_texts() == ["37"]
    page.get_by_role("button", name="Show all 64 ranks").click()
    until(page, "document.querySelectorAll('#ranks tbody tr').length === 64")
    page.locator(chart("loss", by_rank=True)).scroll_into_view_if_needed()
    page.wait_for_selector(chart("loss", by_rank=True, total=64 * 977))
    assert shown(page, "loss", "points", by_rank=True) <= 40_000
    assert 0 < max(sizes) < 1_000_000
    state = client.state("large", lambda state: state["loading"] is None)
    assert sum(found["points"] for found in state["charts"]) == points
    answer = client.ask("/api/chart?run=large&name=loss&by_rank=1")[1]
    assert len(answer) < 1_500_000  # without compression
    curves = json.loads(answer)["curves"]
    assert len(curves) == 64
    assert max(len(curve["x"]) for curve in curves) <= 2000
    assert max(curves[17]["y"]) == synthetic.SPIKE


def test_missing_run_shows_an_empty_page(client, context):
    page = context.new_page()  # its console reports the 404
    try:
        page.goto(f"{client.server.url}&run=quick")
        page.wait_for_selector(".verdict.healthy")
        page.evaluate("location.hash = 'run=nowhere'")
        page.wait_for_selector(".connection.lost")
        assert page.locator(".connection.live").count() == 0
        assert (text(page, "#run-name"), text(page, "#sentence")) == ("nowhere", "")
        assert page.locator(".chart").count() == 0
    finally:
        page.close()


def test_page_reports_lost_connection(root, client, context):
    server = DashboardServer(root / "quick", interval=0.3)
    server.start()
    page = context.new_page()  # its console reports the lost connection
    try:
        page.goto(server.url)
        page.wait_for_selector(".verdict.healthy")
        server.close()
        page.wait_for_selector(".connection.lost")
        server = DashboardServer(
            root / "quick", interval=0.3, port=server.port
        )  # with its own token
        server.start()
        page.wait_for_selector("#connection:has-text('restarted')")
        assert page.locator(".connection.lost").count() == 1
    finally:
        server.close()
        page.close()
