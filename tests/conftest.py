"""Options of the test run."""

ENGINES = ("inline", "local", "ray")


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        action="append",
        choices=ENGINES,
        help="run the conformance suite on this engine only (may be given several times)",
    )
