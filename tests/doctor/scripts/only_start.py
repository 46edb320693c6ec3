"""Nothing but the process group: for runs with ranks missing or twice."""

from common import start

start()
