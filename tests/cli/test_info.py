"""``semel info``"""

import json

import semel as package


def test_json_is_one_document_with_versions_devices_and_extras(semel):
    result = semel("info", "--json")
    facts = json.loads(result.stdout)
    assert facts["semel"] == package.__version__
    assert facts["packages"]["torch"] and facts["packages"]["pyarrow"]
    assert facts["devices"][0]["name"] == "cpu"
    assert "ray" in facts["extras"]


def test_table_names_what_is_missing(semel):
    result = semel("info")
    assert result.exit_code == 0
    assert "torch" in result.stdout and "cpu" in result.stdout
