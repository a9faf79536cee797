"""What chance would give, and what is beyond it: classes, domains, time, other models."""
