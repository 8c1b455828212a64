"""A deployment record in the shapes that others read: OpenDP's registry, NIST SP 800-226.

What only the people who deploy a model can say stands as None in the entry of the registry, and as
an open question among the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNPROTECTED = (
    "the number of units N, the architecture and its dimensions, and the settings of the run",
    "running times, memory, and who was sampled from whoever watches the machine",
    "what was printed or logged from the records without noise, such as training losses",
)
"""Quantities that the guarantee does not cover, whatever the run."""
_NEIGHBOURS = {
    "zero_out": "zero-out: one unit's records are replaced by empty ones, in their places",
    "replace_one": "replace-one: one unit's records are replaced by others",
}


def registry_entry(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of OpenDP's deployments registry: keys and order are the registry's.

    With all but the product's own words it is one of tier 3; tiers ask for more or less of it.
    """
    guarantee, mechanism = record["guarantee"], record["mechanism"]
    epsilon = guarantee["epsilon"]
    return {
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "product": {
                "name": record["name"],
                "data_curators": None,
                "intended_use": None,
                "data_product_type": "Machine learning model",
                "data_product_region": None,
                "description": None,
                "publication_date": None,
                "data_product_sector": None,
            },
            "dp_flavor": {
                "name": "Approximate DP",
                "input_metric": _NEIGHBOURS[record["neighbours"]["relation"]],
                "bound_on_input_distance": 1,
                "output_measure": "approximate max-divergence",
                "bound_on_output_distance": [epsilon, guarantee["delta"]],
                "data_domain": None,
                "unprotected_quantities": list(UNPROTECTED),
            },
            "privacy_loss": {
                "privacy_unit": record["privacy_unit"]["unit"],
                "privacy_unit_description": record["privacy_unit"]["several_records"],
                "privacy_parameters": {"epsilon": epsilon, "delta": guarantee["delta"]},
                "privacy_parameters_description": record["statement"],
            },
            "model": {
                "model_name": "Central",
                "model_name_description": record["trust_model"],
                "actors": None,
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "; ".join(record["post_processing"]),
                "composition": (
                    f"{mechanism['releases']} releases by {mechanism['accountant']}; "
                    f"sampling: {mechanism['sampling']}"
                ),
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": None,
                "mechanisms": mechanism["kind"],
                "justification": None,
            },
        },
        "resources": {"sources": None, "registry_authors": None},
    }


def nist_answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return answers to what NIST SP 800-226 asks of a guarantee, from its top to its ground.

    The layers are those of its pyramid. An answer of None is one that no ledger has.
    """
    guarantee, unit = record["guarantee"], record["privacy_unit"]
    checks = [each for each in record["checks"] if each["state"] != "passed"]
    failed = "; ".join(f"{each['name']}: {each['state']}" for each in checks)
    asked = [
        ("guarantee", "Which definition is met, with which parameters?",
         f"{guarantee['definition']}, epsilon {guarantee['epsilon']}, delta {guarantee['delta']}"),
        ("guarantee", "What is the unit of privacy?", unit["unit"]),
        ("guarantee", "Can one person contribute several units?", unit["several_records"]),
        ("guarantee", "Which data sets are neighbours, and is their size public?",
         f"{record['neighbours']['in_words']}; size: {record['neighbours']['size_of_data']}"),
        ("guarantee", "Does epsilon cover everything that is released from these records?",
         "everything in the ledger of this run; what others released is not in it"),
        ("algorithm", "Which mechanism adds which noise to what?", record["mechanism"]["kind"]),
        ("algorithm", "How are sensitivities bounded?",
         "by proof from the architecture, or by the backward pass; of rounding, what the answer on "
         "arithmetic says"),
        ("algorithm", "What follows without cost?", "; ".join(record["post_processing"])),
        ("algorithm", "Were settings, or this run among several, chosen by looking?", None),
        ("utility", "How accurate is the result, and for whom is it worse?", None),
        ("implementation", "Is the arithmetic of the machine part of the guarantee?",
         _on_arithmetic(record["arithmetic"])),
        ("implementation", "Where does randomness come from?",
         "ChaCha20, keyed by the operating system"),
        ("implementation", "What was checked of this run, and did it hold?",
         failed or "all checks of the report passed"),
        ("implementation", "Which side channels remain?", UNPROTECTED[1]),
        ("trust model", "Who sees records without noise?", record["trust_model"]),
        ("data security", "Who can read the records, the checkpoints and the run folder?", None),
        ("data collection", "How were the records collected, and may they be used so?", None),
    ]  # fmt: skip
    return [
        {"layer": layer, "question": question, "answer": answer}
        for layer, question, answer in asked
    ]


def _on_arithmetic(arithmetic: Mapping[str, Any]) -> str:
    """Return whether rounding is covered: in part, if a caveat of the run is about it."""
    if not arithmetic["not_covered"]:
        return f"yes; epsilon holds for {arithmetic['holds_for']}"
    gaps = " ".join(arithmetic["not_covered"])
    return f"in part; epsilon holds for {arithmetic['holds_for']}. Not covered: {gaps}"
