"""Tasks that publish. The configuration of a run says where tries of a task are killed, and how.

``task`` is the task. ``at`` is a step that changes the storage, by its name, and ``moment`` is ``before`` or ``after``
it, or ``told``: the task has returned, and Airflow does not know yet. The first ``tries`` tries are killed, ``how``:

- ``task``: the process of the task, by SIGKILL. Its supervisor tells Airflow at once.
- ``machine``: the supervisor, too. Airflow finds out when heartbeats stay away.
- ``supervisor``: the supervisor alone. Airflow takes the task for dead. It goes on when the next try is at this step.
"""

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
from airflow.sdk import DAG, get_current_context, task

from trinitylake_ops.airflow_plugin import CommitSensor, PublishOperator, TrinityLakeHook, stage
from trinitylake_ops.iceberg import StagedTable, load_staged, stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.storage.local.storage import LocalStorage

TABLE = "sales.killed"
OF_OTHERS = -1  # rows that another program appends
AGAIN = {"retries": 8, "retry_delay": timedelta(0)}
_STEPS = ("stage", "create", "write", "write_best_effort", "delete")
_ROOT = re.compile(r"^_[01]{32}\.(arrow|ipc)$")
_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[01]{4}(/[01]{4}){2}/[01]{8}|[0-9]{5,}")
_LONGEST_WAIT_S = 900
_lock = threading.Lock()


class Steps:
    """The steps of a try of a task, each noted in the run's file, and the end of the try at one of them."""

    def __init__(self, context):
        conf = {"at": "", "moment": "", "how": "task", "tries": 1, **(context["dag_run"].conf or {})}
        instance = context["ti"]
        self.at, self.moment, self.how = conf["at"], conf["moment"], conf["how"]
        self.is_watched = instance.task_id == conf["task"]
        self.n_try = instance.try_number
        self._notes = Path(os.environ["STEPS_OF"], context["dag_run"].run_id)
        n_killed = self._notes.read_text().count(" killed ") if self._notes.exists() else 0
        self.is_killed = self.is_watched and n_killed < conf["tries"]
        self._n_taken = Counter()

    def watch(self):
        """Count the steps that change the storage from here on."""
        if self.is_watched:
            self._note("begun")
            for name in _STEPS:
                self._count(name)

    def told(self):
        """End after the last step, if that is asked for."""
        if self.is_killed and self.moment == "told":
            self._end("told")

    def _count(self, name):
        inner = getattr(LocalStorage, name)

        def step(storage, path, *arguments):
            what = f"{name} {_RANDOM.sub('*', _ROOT.sub('root', path))}"
            with _lock:
                self._n_taken[what] += 1
                what = f"{what} {self._n_taken[what]}"
            is_it = self.is_killed and what == self.at
            if is_it and self.moment == "before":
                self._end(what)
            self._note(what)
            answer = inner(storage, path, *arguments)
            if what.startswith("create root "):
                self._note("committed")
            if is_it and self.moment == "after":
                self._end(what)
            return answer

        setattr(LocalStorage, name, step)

    def _end(self, what):
        """Kill what is to be killed."""
        self._note(f"killed {self.how} {self.moment} {what}")
        if self.how != "task":
            os.kill(os.getppid(), signal.SIGKILL)
        if self.how != "supervisor":
            os.kill(os.getpid(), signal.SIGKILL)
        end_s = time.monotonic() + _LONGEST_WAIT_S
        while f"\n{self.n_try + 1} {what}\n" not in self._notes.read_text():
            if time.monotonic() > end_s:
                self._note("waited in vain")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
        self._note("goes on")

    def _note(self, what):
        with self._notes.open("a") as notes:
            notes.write(f"{self.n_try} {what}\n")


class KilledPublishOperator(PublishOperator):
    def execute(self, context):
        steps = Steps(context)
        steps.watch()
        result = super().execute(context)
        steps.told()
        return result


with DAG("killed", schedule=None, catchup=False, max_active_runs=4, default_args=AGAIN):

    @task
    def load():
        context = get_current_context()
        steps = Steps(context)
        steps.watch()
        staged = stage(pa.table({"id": [context["dag_run"].conf["id"]]}), TABLE, mode="append")
        steps.told()
        return staged

    @task
    def audit(staged):
        """Read what was staged. Another program appends to the table, so that the publication goes on top of that."""
        lake = TrinityLakeHook().get_conn()
        assert load_staged(lake, StagedTable.from_json(staged)).scan().to_arrow().num_rows > 0
        others = stage_arrow(lake, pa.table({"id": [OF_OTHERS]}), *TABLE.split("."), mode="append")
        publish_once(lake, [others], publication_id(others.metadata_location))

    staged = load()
    publish = KilledPublishOperator(task_id="publish", tables=[staged], message="orders")
    audit(staged) >> publish


for name, mode in (("replaced", "replace_table"), ("refused", "append")):
    with DAG(name, schedule=None, catchup=False):

        @task(task_id="load")
        def load_again(table, mode):
            """Stage what tells how often the run was cleared."""
            run = get_current_context()["dag_run"]
            return stage(pa.table({"cleared": [run.clear_number]}), table, mode=mode)

        PublishOperator(task_id="publish", tables=[load_again(f"sales.{name}", mode)], on_clear="replace")

with DAG("waits", schedule=None, catchup=False):
    for is_deferred in (True, False):
        CommitSensor(
            task_id="deferred" if is_deferred else "poking",
            table="sales.awaited",
            deferrable=is_deferred,
            poke_interval=2,
            timeout=600,
        )

with DAG("together", schedule=None, catchup=False):

    @task
    async def open_together():
        """Ask for a connection with an extra from many coroutines of one loop."""
        opened = await asyncio.gather(*(TrinityLakeHook("trinitylake_with_extra").aget_conn() for _ in range(20)))
        return sorted({lake.root for lake in opened})

    open_together()
