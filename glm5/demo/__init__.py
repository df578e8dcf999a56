"""The demo: one small model of the whole architecture, from nothing to a served answer.

recipe.toml  what is trained when, as `glm5 train` reads it
run          training by that recipe, and the checkpoint it ends in
quality      texts to measure quantization on
scoring      accuracy on held-out questions
showcase     the checkpoint served, and questioned by the openai client
tour         all of it in order, and the summary
"""
