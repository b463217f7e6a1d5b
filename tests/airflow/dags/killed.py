"""Tasks that publish. The configuration of a run says where the first try of a task is killed."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
from airflow.sdk import DAG, get_current_context, task

from trinitylake_ops.airflow_plugin import CommitSensor, PublishOperator, TrinityLakeHook, stage
from trinitylake_ops.storage.local.storage import LocalStorage
from trinitylake_ops.tables import StagedTable, load_staged

TABLE = "sales.killed"
AGAIN = {"retries": 8, "retry_delay": timedelta(0)}
_STEPS = ("prepare", "create", "write", "jot", "delete")
_lock = threading.Lock()


def end(context):
    """Kill this process, and leave a note of it."""
    Path(os.environ["STEPS_OF"], f"killed-{context['dag_run'].run_id}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def killing(context):
    """Count the steps that change the storage, and kill this process at one of them, in the first try of a task."""
    conf = context["dag_run"].conf or {}
    if context["ti"].task_id != conf.get("task"):
        return
    is_killed = context["ti"].try_number == 1
    taken = [0]

    def counted(name):
        inner = getattr(LocalStorage, name)

        def step(self, *arguments):
            with _lock:
                taken[0] += 1
                is_it = is_killed and taken[0] == conf["at"]
            if is_it and conf["moment"] == "before":
                end(context)
            answer = inner(self, *arguments)
            if is_it:
                end(context)
            with _lock:
                Path(os.environ["STEPS_OF"], f"{conf['task']}-{taken[0]}").touch()
            return answer

        setattr(LocalStorage, name, step)

    for name in _STEPS:
        counted(name)


class KilledPublishOperator(PublishOperator):
    def execute(self, context):
        killing(context)
        result = super().execute(context)
        conf = context["dag_run"].conf or {}
        if conf.get("task") == self.task_id and conf["moment"] == "told" and context["ti"].try_number == 1:
            end(context)  # it is published, and Airflow does not know yet
        return result


with DAG("killed", schedule=None, catchup=False, max_active_runs=4, default_args=AGAIN):

    @task
    def load():
        context = get_current_context()
        killing(context)
        return stage(pa.table({"id": [context["dag_run"].conf["id"]]}), TABLE, mode="append")

    @task
    def audit(staged):
        table = load_staged(TrinityLakeHook().get_conn(), StagedTable.from_json(staged))
        assert table.scan().to_arrow().num_rows > 0

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
