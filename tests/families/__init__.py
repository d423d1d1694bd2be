"""All that tests know of each family: a file for each module of formats/families, with a card for each `model_type`."""
