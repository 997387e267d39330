"""The mini model's own world: pictures drawn by rule, texts that describe them, and a judge that looks at pictures without having learnt to."""
