"""What clients ask the server to remember: responses, conversations, chat completions."""
