"""What a model can do: tasks, answered by the engine or seen through other attention, and tables of them."""
