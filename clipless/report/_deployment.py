"""A deployment record: what somebody who publishes a private model has to declare of it.

Unit of privacy, neighbours, parameters, accounting, what is released, post-processing, hazards; and
the same as an entry of a public registry and as answers to NIST SP 800-226 (`_registry.py`). It is
made from the public report alone, so that it can be published like that; what only the people who
deploy the model can say is listed as open.
"""

from __future__ import annotations

from typing import Any

from clipless.report._registry import nist_answers, registry_entry
from clipless.report._report import RunReport

POST_PROCESSING = (
    "optimizer, momentum, weight decay, learning-rate schedule",
    "averages of weights",
    "projection of weights into their constraint sets",
    "choice of thresholds from released, noisy counts",
)
"""What happens to released gradients; it costs nothing."""
OPEN_QUESTIONS = (
    "Who is accountable for this deployment, and whom can people ask?",
    "What are the records about, how were they collected, and may they be used for this?",
    "What else was or will be released from the same records? Its cost adds to this one.",
    "Were settings, or this run among several, chosen by looking at these records?",
    "Who can read the run folder, its checkpoints and the records themselves?",
    "Which epsilon is acceptable for this use, who decided that, and when is it reviewed?",
)
"""What no ledger knows."""
_UNITS = {
    "example": "one record (training example)",
    "user": "one user, with all records of that user id",
}
_UNIT_QUESTIONS = {
    "example": "How many records can one person have? The unit of privacy is one record.",
    "user": "Can one person have several user ids? The unit of privacy is one user id.",
}


def deployment_record(report: RunReport) -> dict[str, Any]:
    """Return the record of a run as plain data, ready for JSON."""
    public = report.to_dict()
    claim = public["claim"]
    curve = claim["trade_off"] or {}
    spent = public["spending"]
    record = {
        "name": public["run"],
        "written": public["written"],
        "sound": public["sound"],
        "statement": claim["headline"],
        "privacy_unit": {
            "unit": _UNITS[claim["unit"]],
            "units": claim["dataset_size"],
            "several_records": (
                "not covered as one unit: see clipless.accounting.group_epsilon"
                if claim["unit"] == "example"
                else f"covered: {claim['unit_in_words']}"
            ),
        },
        "neighbours": {
            "relation": "replace_one" if claim["replaces"] else "zero_out",
            "in_words": claim["relation"],
            "size_of_data": "public",
        },
        "trust_model": "central: whoever trains holds the records",
        "guarantee": {
            "definition": "(epsilon, delta)-differential privacy",
            "epsilon": claim["epsilon"],
            "delta": claim["delta"],
            "gaussian_mu": curve.get("gaussian_mu"),
            "gaussian_tail": curve.get("gaussian_tail"),
            "attack_advantage": curve.get("advantage"),
            "attack_accuracy_by_base_rate": curve.get("attack_accuracy"),
        },
        "mechanism": {
            "kind": "Gaussian noise on sums of bounded per-example gradients",
            "sampling": claim["sampling"],
            "accountant": claim["accountant"],
            "releases": claim["releases"],
            "composition": [] if spent is None else spent["items"],
        },
        "arithmetic": {
            "holds_for": claim["arithmetic"],
            "not_covered": list(claim["arithmetic_caveats"]),
        },
        "released": "every noisy gradient, hence the weights after every step",
        "post_processing": list(POST_PROCESSING),
        "hazards": [*claim["not_protected"], *claim["caveats"]],
        "checks": [
            {"name": each["name"], "state": each["state"], "detail": each["detail"]}
            for each in public["checks"]
        ],
        "implementation": public["environment"],
        "open_questions": [
            *OPEN_QUESTIONS[:2],
            _UNIT_QUESTIONS[claim["unit"]],
            *OPEN_QUESTIONS[2:],
        ],
    }
    return {**record, "registry": registry_entry(record), "nist_sp_800_226": nist_answers(record)}
