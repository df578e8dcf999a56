"""The demo: one small model of the whole architecture, from nothing to a served answer.

recipe       what is trained when: the mixture of questions and the schedule
muon         the optimizer of the matrices
training     one training step
run          training with progress and resumption, and the checkpoint it ends in
scoring      accuracy on held-out questions
showcase     the checkpoint served, and questioned by the openai client
tour         all of it in order, and the summary
"""
