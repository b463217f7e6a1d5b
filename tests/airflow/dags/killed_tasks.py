"""Tasks that publish and can be killed. The configuration of a run defines where and how.

- ``task``: The task to kill.
- ``step`` and ``timing``: The name of the step that changes the storage, and ``before`` or ``after`` it. With the
  timing ``returned``, the task has returned and Airflow has not received the result.
- ``tries``: The number of tries that are killed.
- ``scope``: ``task`` kills the process of the task; its supervisor immediately reports this to Airflow. ``machine``
  also kills the supervisor; Airflow detects the missing heartbeats. ``supervisor`` kills only the supervisor: Airflow
  assumes that the task is dead, but the task continues once the next try has reached the same step.
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
OTHER_PROGRAM_ID = -1  # rows appended by another program
RETRIES = {"retries": 8, "retry_delay": timedelta(0)}
_STEPS = ("stage", "create", "write", "write_best_effort", "delete")
_ROOT = re.compile(r"^_[01]{32}\.(arrow|ipc)$")
_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[01]{4}(/[01]{4}){2}/[01]{8}|[0-9]{5,}")
_MAX_WAIT_S = 900
_lock = threading.Lock()


class Steps:
    """Record the steps of a task's try in the run's file, and kill the try at the configured step."""

    def __init__(self, context):
        conf = {"step": "", "timing": "", "scope": "task", "tries": 1, **(context["dag_run"].conf or {})}
        instance = context["ti"]
        self.kill_step, self.timing, self.scope = conf["step"], conf["timing"], conf["scope"]
        self.is_watched = instance.task_id == conf["task"]
        self.try_number = instance.try_number
        self._notes = Path(os.environ["STEPS_FOLDER"], context["dag_run"].run_id)
        n_killed = self._notes.read_text().count(" killed ") if self._notes.exists() else 0
        self.is_killed = self.is_watched and n_killed < conf["tries"]
        self._n_occurrences = Counter()

    def watch(self):
        """Start to record the steps that change the storage."""
        if self.is_watched:
            self._note("started")
            for name in _STEPS:
                self._count(name)

    def kill_after_return(self):
        """Kill the task after its last step, if configured."""
        if self.is_killed and self.timing == "returned":
            self._kill("returned")

    def _count(self, name):
        original = getattr(LocalStorage, name)

        def step(storage, path, *arguments):
            step_name = f"{name} {_RANDOM.sub('*', _ROOT.sub('root', path))}"
            with _lock:
                self._n_occurrences[step_name] += 1
                step_name = f"{step_name} {self._n_occurrences[step_name]}"
            is_kill_step = self.is_killed and step_name == self.kill_step
            if is_kill_step and self.timing == "before":
                self._kill(step_name)
            self._note(step_name)
            result = original(storage, path, *arguments)
            if step_name.startswith("create root "):
                self._note("committed")
            if is_kill_step and self.timing == "after":
                self._kill(step_name)
            return result

        setattr(LocalStorage, name, step)

    def _kill(self, step_name):
        """Kill the processes in the configured scope."""
        self._note(f"killed {self.scope} {self.timing} {step_name}")
        if self.scope != "task":
            os.kill(os.getppid(), signal.SIGKILL)
        if self.scope != "supervisor":
            os.kill(os.getpid(), signal.SIGKILL)
        end_s = time.monotonic() + _MAX_WAIT_S
        while f"\n{self.try_number + 1} {step_name}\n" not in self._notes.read_text():
            if time.monotonic() > end_s:
                self._note("timed out")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
        self._note("continues")

    def _note(self, text):
        with self._notes.open("a") as notes:
            notes.write(f"{self.try_number} {text}\n")


class KilledPublishOperator(PublishOperator):
    def execute(self, context):
        steps = Steps(context)
        steps.watch()
        result = super().execute(context)
        steps.kill_after_return()
        return result


with DAG("killed", schedule=None, catchup=False, max_active_runs=4, default_args=RETRIES):

    @task
    def load():
        context = get_current_context()
        steps = Steps(context)
        steps.watch()
        staged = stage(pa.table({"id": [context["dag_run"].conf["id"]]}), TABLE, mode="append")
        steps.kill_after_return()
        return staged

    @task
    def audit(staged):
        """Read the staged table, and append to the table as another program could do before the publication."""
        lake = TrinityLakeHook().get_conn()
        assert load_staged(lake, StagedTable.from_json(staged)).scan().to_arrow().num_rows > 0
        concurrent_rows = stage_arrow(lake, pa.table({"id": [OTHER_PROGRAM_ID]}), *TABLE.split("."), mode="append")
        publish_once(lake, [concurrent_rows], publication_id(concurrent_rows.metadata_location))

    staged = load()
    publish = KilledPublishOperator(task_id="publish", tables=[staged], message="orders")
    audit(staged) >> publish


for name, mode in (("replaced", "replace_table"), ("rejected", "append")):
    with DAG(name, schedule=None, catchup=False):

        @task(task_id="load")
        def stage_clear_number(table, mode):
            """Stage the number of times that the run was cleared."""
            run = get_current_context()["dag_run"]
            return stage(pa.table({"cleared": [run.clear_number]}), table, mode=mode)

        PublishOperator(task_id="publish", tables=[stage_clear_number(f"sales.{name}", mode)], on_clear="replace")

with DAG("sensors", schedule=None, catchup=False):
    for is_deferred in (True, False):
        CommitSensor(
            task_id="deferred" if is_deferred else "poking",
            table="sales.awaited",
            deferrable=is_deferred,
            poke_interval=2,
            timeout=600,
        )

with DAG("coroutines", schedule=None, catchup=False):

    @task
    async def open_concurrently():
        """Open a connection with extras from many coroutines of one event loop."""
        lakes = await asyncio.gather(*(TrinityLakeHook("trinitylake_with_extra").aget_conn() for _ in range(20)))
        return sorted({lake.root for lake in lakes})

    open_concurrently()
