"""Take the screenshot of Airflow in docs/images, in which a user approves a plan.

``.venv/bin/python -m scripts.make_airflow_picture`` runs the test that takes the screenshot in a separate Airflow. It
needs Chromium, and Pillow from the dependency group ``bench``.
"""

from __future__ import annotations

from scripts.make_dagster_pictures import take_screenshots

TEST = "tests/airflow/test_airflow.py::test_user_approves_plan"

if __name__ == "__main__":
    take_screenshots(TEST, pattern="airflow*/airflow-approval.png")
