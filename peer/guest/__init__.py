"""A guest's terms: what the owner of a machine lends to runs, and when the machine is given up."""
