"""Draws the picture of docs/images that shows Airflow: a person approves a plan, as the test of it sees the page.

``.venv/bin/python -m scripts.make_airflow_picture`` runs this test, in an Airflow of its own. It needs Chromium, and
Pillow, which comes with the extra ``bench``.
"""

from __future__ import annotations

from scripts.make_dagster_pictures import draw

TEST = "tests/airflow/test_airflow.py::test_a_person_approves_a_plan"

if __name__ == "__main__":
    draw(TEST, pictures="airflow*/airflow-approval.png")
