"""Statistics of routing, tested against chance: token classes, domains, training time, two models."""
