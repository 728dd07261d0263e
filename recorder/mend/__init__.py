"""Making logs sound or smaller: recover, compact, rewrite."""
