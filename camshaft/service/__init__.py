"""The server behind `camshaft serve`: training and sampling over the Tinker API, on the engines of this package.

    with RoleProcess(config) as role:
        service = Service(config, role)
        with LocalServer(App(service, keys), limits, config.port) as server:
            service.start()
            server.serve_forever()
        service.close()

A request is a command of a model, or a request for samples. Its handler checks it, puts it in a queue, and answers
with the id of a future. One thread executes the queue on the role (`roles/served.py`), which runs in a process of its
own; nothing in this package touches an engine or a rollout. Samples may have a queue, a thread and processes of their
own (`roles/sampled.py`).

    app.py           routes: HTTP requests, keys, replies
    codec.py         datums to rows of an engine, and log-probs and samples to messages
    commands.py      the commands of each model, in the order of their numbers
    futures.py       results that clients fetch
    models.py        models of clients, and the execution of their commands
    sampling.py      versions of weights, samplers, and batches of requests
    scoring.py       log-probs that requests for samples ask for
    keys.py          API keys
    checkpoints.py   names, paths and folders of saved weights
    store.py         the log: sessions, commands and results in an SQLite database
    runs.py          lists of training runs and saved weights, and their removal
    sessions.py      sessions of clients, which own models and samplers
    errors.py        errors of requests and of commands
    process.py       the processes of the roles, and their restart
    service.py       what the routes call; it joins the parts above
"""
