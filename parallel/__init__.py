"""Plans, groups, collectives, sharded loading and the control plane. Knows no model."""
