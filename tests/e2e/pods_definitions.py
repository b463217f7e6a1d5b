"""Definitions for the Kubernetes test: a lakehouse with a published and checked table, with a pod for each step."""

import os

import dagster as dg
from dagster_k8s import k8s_job_executor

from tests.dagster_plugin.incident_project import ROOT, shop_definitions

EXECUTOR = k8s_job_executor.configured(
    {
        "load_incluster_config": False,
        "kubeconfig_file": os.environ["KUBECONFIG"],
        "step_k8s_config": {"container_config": {"resources": {"limits": {"memory": "1Gi"}}}},
    }
)
defs = dg.Definitions.merge(shop_definitions(os.environ[ROOT]), dg.Definitions(executor=EXECUTOR))
