-------------------------------- MODULE Isr --------------------------------
(* How a partition is replicated, small enough to visit every state: what docs/PROTOCOL.md says in
   words. A rule has one name there, in the code and here. Taken out of Rules, TLC finds the
   shortest way to what it prevents. test_isr_model.py writes the scopes and runs them.

   metadata   a list of what was decided; each node acts on an entry of its own, and goes on to a
              later one when it likes, also past several at once
   leader     what its followers told it, the high watermark, the change that it has proposed
   follower   the last thing it said; that arrives at any time or never, also when the process that
              said it is gone, or its files are
   command    a proposed change of the isr, decided at any time or never

   Acknowledged is what a high watermark has passed. A machine that went down may have lost any part
   of its log that was not counted as synced. One record is acknowledged at the beginning; how often
   anything else may happen is bounded. *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Nodes, First, Nobody,  \* the first leader; who leads when nobody does
    FirstIsr, MinInsync,
    Rules,
    Records, Proposals, Moves, Fences, Returns, Elections, Crashes, Tails, Wipes, Alters

VARIABLES
    s,   \* all of the state, as one record: see Init
    did  \* the last step in words, for whoever reads a trace; no part of what is compared

Compared == s
AllRules == {"epoch", "version", "proposed", "assignment", "resubscribe", "promised",
             "promised: vouch late", "longest", "longest: moves wait", "confirmed", "incarnation"}
ASSUME Rules \subseteq AllRules /\ First \in FirstIsr /\ FirstIsr \subseteq Nodes
Has(rule) == rule \in Rules
Alike == Permutations(FirstIsr \ {First})  \* followers that begin alike: swapped, nothing differs

\* ---------------------------------------------------------------- parts of a state

Least(numbers) == CHOOSE a \in numbers : \A b \in numbers : a <= b
Range(log) == {log[i] : i \in 1..Len(log)}
Cut(log, end) == SubSeq(log, 1, end)
CommonEnd(a, b) ==  \* up to where two logs, of <<epoch, record>>, have the same epochs
    LET both == Least({Len(a), Len(b)})
        other == {i \in 1..both : a[i][1] # b[i][1]}
    IN  IF other = {} THEN both ELSE Least(other) - 1

Newest(S) == S.metadata[Len(S.metadata)]
Seen(S, n) == S.metadata[S.nodes[n].applied]
Floor(d) == Least({MinInsync, Cardinality(d.replicas)})
Leads(S, n) ==
    /\ S.nodes[n].up
    /\ Seen(S, n).leader = n
    /\ Seen(S, n).incarnation[n] = S.nodes[n].incarnation \/ ~Has("incarnation")

Unheard == [n \in Nodes |-> <<>>]
Idle(node) == [node EXCEPT !.hw = 0, !.start = 0, !.heard = Unheard, !.proposed = {}]

\* ---------------------------------------------------------------- the metadata decides

\* `after` becomes the newest entry: with its move finished if it can be, a leader, the next epoch
\* and version, and a number for each new assignment. One state for each possible leader.
Decided(S, after) ==
    LET before == Newest(S)
        done == after.target # {} /\ after.target \subseteq after.isr
                                  /\ after.target \cap after.alive # {}
        isr == IF done THEN after.target ELSE after.isr
        replicas == IF done THEN after.target ELSE after.replicas
        able == isr \cap after.alive
        leaders == CASE after.leader \in able -> {after.leader}
                     [] able = {} -> {Nobody}
                     [] OTHER -> able
        Entry(leader) ==
            LET led == leader # before.leader \/ after.leader # before.leader
                d == [after EXCEPT !.epoch = IF led THEN @ + 1 ELSE @, !.leader = leader,
                                   !.isr = isr, !.replicas = replicas,
                                   !.target = IF done THEN {} ELSE @,
                                   !.told = IF isr = {} THEN @ ELSE Unheard]
                version == IF led \/ <<d.isr, d.replicas, d.target, d.told>> #
                               <<before.isr, before.replicas, before.target, before.told>>
                           THEN before.version + 1 ELSE before.version
            IN  [d EXCEPT !.version = version, !.assignment = [n \in Nodes |->
                    CASE n \notin replicas -> 0 [] @[n] # 0 -> @[n] [] OTHER -> version]]
    IN  {[S EXCEPT !.metadata = Append(@, d)] : d \in {Entry(n) : n \in leaders} \ {before}}

\* ---------------------------------------------------------------- leader and followers

\* The high watermark goes as far as the rules allow; what it passes is acknowledged.
Advance(S, n) ==
    LET node == S.nodes[n]
        d == Seen(S, n)
        counted == (d.isr \cup UNION {DOMAIN c.members : c \in node.proposed}) \ {n}
        own == IF d.always THEN node.synced ELSE Len(node.log)
        end == Least({own} \cup {IF node.heard[m] = <<>> THEN 0 ELSE node.heard[m][3] :
                                 m \in counted})
        lost == {i \in 1..end : node.log[i] \in S.excused}
        readable == Cut(node.log, IF lost = {} THEN end ELSE Least(lost) - 1)
        both == Least({Len(readable), Len(S.acknowledged)})
        after == [S EXCEPT !.nodes[n].hw = end]
    IN  CASE ~Leads(S, n) -> S
          [] Cardinality(d.isr) < Floor(d) \/ end <= node.hw -> S
          [] Cut(readable, both) # Cut(S.acknowledged, both) ->
                [after EXCEPT !.broken = "two records at an offset below a high watermark"]
          [] Len(readable) > both -> [after EXCEPT !.acknowledged = readable]
          [] OTHER -> after

\* A subscription, or the progress since: what a follower has, as which replica.
Subscribed(n, node, d) ==
    [node EXCEPT
        !.said = {[leader |-> d.leader, epoch |-> d.epoch, assignment |-> d.assignment[n],
                   incarnation |-> node.incarnation, log |-> node.log]},
        !.synced = IF d.always THEN Len(node.log) ELSE @]

\* What a node does with an entry. `olds` has the one that it acted on before, if there is one.
TakeUp(n, node, olds, d) ==
    CASE n \notin d.replicas -> Idle(node)
      [] \A old \in olds : n \notin old.replicas \/ old.epoch # d.epoch ->
            IF d.leader \notin {n, Nobody} THEN Subscribed(n, Idle(node), d)
            ELSE [Idle(node) EXCEPT !.said = {},
                                    !.start = IF d.leader = n THEN Len(node.log) ELSE 0]
      [] d.leader = n ->
            [node EXCEPT
                !.heard = [m \in Nodes |->
                    IF /\ m \in d.replicas /\ @[m] # <<>>
                       /\ ~Has("assignment") \/ @[m][1] = d.assignment[m]
                    THEN @[m] ELSE <<>>],
                !.proposed = {c \in @ : c.version >= d.version}]
      [] /\ d.leader \notin {n, Nobody} /\ Has("resubscribe")
         /\ \E old \in olds : old.assignment[n] # d.assignment[n] -> Subscribed(n, node, d)
      [] OTHER -> node

Hears(S, f, m) ==  \* whether the leader that it is for listens to what `f` said
    /\ Leads(S, m.leader)
    /\ LET d == Seen(S, m.leader)
       IN  /\ f \in d.replicas
           /\ ~Has("epoch") \/ m.epoch = d.epoch
           /\ ~Has("incarnation") \/ (f \in d.alive /\ m.incarnation = d.incarnation[f])
           /\ ~Has("assignment") \/ m.assignment = d.assignment[f]

\* What a follower said makes a difference: it counts, or the follower is to cut.
Arrives(S, f, m) ==
    /\ Hears(S, f, m)
    /\ LET end == CommonEnd(S.nodes[m.leader].log, m.log)
       IN  IF end = Len(m.log)
           THEN S.nodes[m.leader].heard[f] # <<m.assignment, m.incarnation, end>>
           ELSE /\ S.nodes[f].up /\ S.nodes[f].incarnation = m.incarnation
                /\ f \in Seen(S, f).replicas

HasNext(S, f, m) ==  \* there is a record for it to fetch
    LET log == S.nodes[f].log
    IN  /\ S.nodes[f].up /\ Hears(S, f, m) /\ S.nodes[f].incarnation = m.incarnation
        /\ f \in Seen(S, f).replicas /\ Len(log) < Len(S.nodes[m.leader].log)
        /\ CommonEnd(log, S.nodes[m.leader].log) = Len(log)

IsBehind(S, n) == S.nodes[n].up /\ S.nodes[n].applied < Len(S.metadata)
IsUnsynced(S, n) ==
    S.nodes[n].up /\ Seen(S, n).always /\ S.nodes[n].synced < Len(S.nodes[n].log)
IsUntold(S, n) ==
    /\ S.nodes[n].up /\ ~IsBehind(S, n)
    /\ Newest(S).isr = {} /\ n \in Newest(S).replicas /\ Newest(S).told[n] = <<>>

\* Something happens by itself, without a fault, a client or an operator.
IsBusy(S) ==
    \/ S.commands # {}
    \/ \E n \in Nodes : \/ IsBehind(S, n) \/ IsUnsynced(S, n) \/ IsUntold(S, n)
                        \/ \E m \in S.nodes[n].said : Arrives(S, n, m) \/ HasNext(S, n, m)

\* ---------------------------------------------------------------- nodes that come back

\* What the last copy in sync lost, and none of those left has, was not promised.
Excuse(S, old) ==
    LET d == Newest(S)
        held == UNION {Range(S.nodes[n].log) : n \in IF d.isr = {} THEN d.replicas ELSE d.isr}
        excused == S.excused \cup (Range(old) \ held)
        gone == {i \in 1..Len(S.acknowledged) : S.acknowledged[i] \in excused}
    IN  [S EXCEPT !.excused = excused,
                  !.acknowledged = IF gone = {} THEN @ ELSE Cut(@, Least(gone) - 1)]

\* A process starts, with its log up to `end`, on the newest entry.
Started(S, n, end, synced) ==
    LET node == [Idle(S.nodes[n]) EXCEPT !.up = TRUE, !.incarnation = @ + 1,
                    !.applied = Len(S.metadata), !.log = Cut(@, end), !.synced = synced]
    IN  Advance([S EXCEPT !.nodes[n] = TakeUp(n, node, {}, Newest(S))], n)

\* It registers, and says what it lost: "nothing", its "tail" or "everything".
Registered(S, n, lost, end) ==
    LET node == S.nodes[n]
        d == Newest(S)
        always == IF Has("promised") THEN n \in d.promised ELSE d.always
        hurt == lost = "everything" \/ (lost = "tail" /\ ~always)
        others == d.isr \ {n}
        isr == CASE n \notin d.isr \/ ~hurt -> d.isr
                 [] others # {} -> others
                 [] lost = "tail" -> d.isr
                 [] OTHER -> IF Has("longest") THEN {} ELSE d.replicas \ {n}
        after == [d EXCEPT !.leader = IF @ = n THEN Nobody ELSE @, !.isr = isr,
                           !.told[n] = IF lost = "everything" THEN <<0, 0>> ELSE <<>>,
                           !.incarnation[n] = @ + 1, !.alive = @ \cup {n},
                           !.promised = IF d.always THEN @ \cup {n} ELSE @ \ {n}]
        synced == IF Has("promised: vouch late") THEN end ELSE Least({end, node.synced})
        started == {Started(T, n, end, synced) : T \in Decided(S, after)}
    IN  IF hurt /\ others = {} THEN {Excuse(T, node.log) : T \in started} ELSE started

\* ---------------------------------------------------------------- fewer states

\* What of an entry a node acts on.
Concern(n, d) ==
    CASE n \notin d.replicas -> <<>>
      [] d.leader = n \/ d.isr = {} -> <<d.epoch, d.version, d.leader, d.replicas, d.isr,
                                        d.assignment, d.incarnation, d.alive, d.always, d.told>>
      [] OTHER -> <<d.epoch, d.leader, d.assignment[n], d.always>>

\* An entry that is not the newest, without what none of those who come to it acts on.
Past(d, led) ==
    CASE d.isr = {} -> d
      [] led -> [d EXCEPT !.target = {}, !.promised = {}]
      [] OTHER -> [d EXCEPT !.version = 0, !.isr = {Nobody}, !.target = {}, !.alive = {},
                            !.incarnation = [n \in Nodes |-> 0], !.promised = {}]

\* Forgets what makes no difference any more, and lets nodes pass entries that say nothing to them:
\* states that differ in nothing else are one.
Tidy(S) ==
    LET idle == S.left.crashes = 0 /\ \A n \in Nodes : S.nodes[n].up
        tails == IF idle THEN 0 ELSE S.left.tails
        left == [S.left EXCEPT !.tails = tails, !.wipes = IF idle THEN 0 ELSE @,
                               !.alters = IF tails = 0 THEN 0 ELSE @]
        entries == IF tails > 0 THEN S.metadata
                   ELSE [i \in 1..Len(S.metadata) |->
                            [S.metadata[i] EXCEPT !.always = FALSE, !.promised = {}]]
        last == Len(entries)
        At(n) == LET at == S.nodes[n].applied
                     same == {i \in at..last :
                                  \A j \in at..i : Concern(n, entries[j]) = Concern(n, entries[at])}
                 IN  CHOOSE i \in same : i + 1 \notin same
        applied == [n \in Nodes |-> IF S.nodes[n].up THEN At(n) ELSE 0]
        first == Least({last} \cup {applied[n] : n \in {m \in Nodes : S.nodes[m].up}})
        Late(f, m) ==  \* said to somebody who will never listen
            LET to == S.nodes[m.leader]
                d == entries[to.applied]
            IN  \/ ~to.up
                \/ d.epoch > m.epoch
                \/ d.incarnation[f] > m.incarnation
                \/ (Has("assignment") /\ d.assignment[f] > m.assignment)
        Tidied(n) ==
            LET node == S.nodes[n]
            IN  [node EXCEPT
                    !.applied = IF node.up THEN applied[n] - first + 1 ELSE 0,
                    !.said = IF {"epoch", "incarnation"} \subseteq Rules
                             THEN {m \in @ : ~Late(n, m)} ELSE @,
                    !.synced = IF tails > 0 THEN @ ELSE Len(node.log),
                    !.start = IF @ > node.hw THEN @ ELSE 0]
        Led(i) == LET n == entries[i].leader
                  IN  n # Nobody /\ S.nodes[n].up /\ applied[n] <= i
    IN  [S EXCEPT
            !.left = left,
            !.commands = {c \in @ : \/ ~Has("version") \/ c.version = entries[last].version
                                    \/ c \in S.nodes[c.leader].proposed},
            !.nodes = [n \in Nodes |-> Tidied(n)],
            !.metadata = [i \in 1..(last - first + 1) |->
                IF i = last - first + 1 THEN entries[last]
                ELSE Past(entries[first + i - 1], Led(first + i - 1))]]

\* ---------------------------------------------------------------- steps that happen by themselves

Do(what, states) == \E S \in states : s' = Tidy(S) /\ did' = what

\* A proposed change of the isr is applied, or refused and its proposer told so.
Decide(c) ==
    LET d == Newest(s)
        isr == DOMAIN c.members
        S == [s EXCEPT !.commands = @ \ {c}]
        fits == /\ c.leader = d.leader /\ c.epoch = d.epoch /\ isr \subseteq d.replicas
                /\ ~Has("version") \/ c.version = d.version
                /\ Cardinality(isr) >= Floor(d) \/ d.isr \subseteq isr
                /\ \A n \in isr \ d.isr :
                    n \in d.alive /\ (~Has("incarnation") \/ c.members[n] = d.incarnation[n])
    IN  IF fits THEN Do(<<"decided: isr", isr, "of", c.leader>>, Decided(S, [d EXCEPT !.isr = isr]))
        ELSE Do(<<"refused: isr", isr, "of", c.leader>>,
                {Advance([S EXCEPT !.nodes[c.leader].proposed = @ \ {c}], c.leader)})

Apply(n) ==
    /\ IsBehind(s, n)
    /\ \E i \in (s.nodes[n].applied + 1)..Len(s.metadata) :
        LET node == TakeUp(n, s.nodes[n], {Seen(s, n)}, s.metadata[i])
        IN  Do(<<n, "applies version", s.metadata[i].version, "epoch", s.metadata[i].epoch>>,
               {Advance([s EXCEPT !.nodes[n] = [node EXCEPT !.applied = i]], n)})

Deliver(f, m) ==
    LET n == m.leader
        end == CommonEnd(s.nodes[n].log, m.log)
        cut == [s.nodes[f] EXCEPT !.log = Cut(@, end), !.synced = Least({@, end})]
    IN  /\ Arrives(s, f, m)
        /\ IF end = Len(m.log)
           THEN Do(<<n, "hears that", f, "has", end>>,
                   {Advance([s EXCEPT !.nodes[n].heard[f] = <<m.assignment, m.incarnation, end>>],
                            n)})
           ELSE Do(<<n, "has", f, "cut to", end>>,
                   {[s EXCEPT !.nodes[f] = Subscribed(f, cut, Seen(s, f))]})

Fetch(f, m) ==  \* a follower appends the next record, and tells
    LET end == Len(s.nodes[f].log) + 1
        log == Cut(s.nodes[m.leader].log, end)
    IN  /\ HasNext(s, f, m)
        /\ Do(<<f, "fetches from", m.leader>>,
              {[s EXCEPT !.nodes[f] = [@ EXCEPT !.log = log, !.said = {[m EXCEPT !.log = log]},
                                       !.synced = IF Seen(s, f).always THEN end ELSE @]]})

Sync(n) ==
    /\ IsUnsynced(s, n)
    /\ Do(<<n, "syncs">>, {Advance([s EXCEPT !.nodes[n].synced = Len(s.nodes[n].log)], n)})

\* While no copy is in sync. When all have told, the longest is elected.
Tell(n) ==
    LET d == Newest(s)
        log == s.nodes[n].log
        told == [d.told EXCEPT ![n] = <<IF log = <<>> THEN 0 ELSE log[Len(log)][1], Len(log)>>]
        Longer(a, b) == a[1] > b[1] \/ (a[1] = b[1] /\ a[2] >= b[2])
        longest == {m \in d.replicas : \A o \in d.replicas : Longer(told[m], told[o])}
        after == [d EXCEPT !.told = told]
    IN  /\ IsUntold(s, n)
        /\ Do(<<n, "tells that it ends at", Len(log)>>,
              IF \E m \in d.replicas : told[m] = <<>> THEN Decided(s, after)
              ELSE UNION {Decided(s, [after EXCEPT !.isr = {m}]) : m \in longest})

ByItself ==
    \/ \E c \in s.commands : Decide(c)
    \/ \E n \in Nodes : \/ Apply(n) \/ Sync(n) \/ Tell(n)
                        \/ \E m \in s.nodes[n].said : Deliver(n, m) \/ Fetch(n, m)

\* ---------------------------------------------------------------- faults, clients and operators

\* Each as often as is left of its budget.
Spend(budget, what, states) ==
    /\ s.left[budget] > 0
    /\ Do(what, {[S EXCEPT !.left[budget] = @ - 1] : S \in states})

Produce(n) ==
    LET epoch == Seen(s, n).epoch
        at == Len(s.nodes[n].log) + 1
        twice == \E m \in Nodes : Len(s.nodes[m].log) >= at /\ s.nodes[m].log[at][1] = epoch
    IN  /\ Leads(s, n)
        /\ Spend("records", <<n, "appends a record">>,
              {Advance([s EXCEPT !.nodes[n].log = Append(@, <<epoch, s.left.records>>),
                  !.broken = IF twice THEN "an offset was given out twice in an epoch" ELSE @], n)})

\* A leader proposes to let in whoever is ready, and to put out any others.
Propose(n) ==
    LET node == s.nodes[n]
        d == Seen(s, n)
        ready == {m \in d.alive : /\ node.heard[m] # <<>> /\ node.heard[m][2] = d.incarnation[m]
                                  /\ node.heard[m][3] >= node.hw /\ node.heard[m][3] >= node.start}
        Change(isr) == [leader |-> n, epoch |-> d.epoch, version |-> d.version,
                        members |-> [m \in isr |-> d.incarnation[m]]]
    IN  /\ Leads(s, n) /\ node.proposed = {}
        /\ \E out \in SUBSET (d.isr \ {n}) :
            LET isr == (d.isr \ out) \cup (ready \ d.isr)
            IN  /\ isr # d.isr /\ (out = {} \/ Cardinality(isr) >= Floor(d))
                /\ Spend("proposals", <<n, "proposes isr", isr>>,
                      {[s EXCEPT !.nodes[n].proposed = {Change(isr)},
                                 !.commands = @ \cup {Change(isr)}]})

Move(wanted) ==
    LET d == Newest(s)
        useless == (d.target \ d.isr) \ wanted
    IN  /\ wanted # (IF d.target = {} THEN d.replicas ELSE d.target)
        /\ wanted \subseteq d.replicas \cup d.alive
        /\ d.isr # {} \/ ~Has("longest: moves wait")  \* whoever is put out may be the longest
        /\ Spend("moves", <<"moved to", wanted>>, Decided(s,
              [d EXCEPT !.replicas = (@ \ useless) \cup wanted, !.target = wanted]))

Fence(n) ==
    /\ n \in Newest(s).alive
    /\ Spend("fences", <<n, "is fenced">>, Decided(s, [Newest(s) EXCEPT !.alive = @ \ {n}]))

Return(n) ==
    /\ s.nodes[n].up /\ n \notin Newest(s).alive
    /\ Newest(s).incarnation[n] = s.nodes[n].incarnation
    /\ Spend("returns", <<n, "is alive again">>,
             Decided(s, [Newest(s) EXCEPT !.alive = @ \cup {n}]))

Elect(n) ==
    /\ n \in Newest(s).alive \cap Newest(s).isr /\ Newest(s).leader \notin {n, Nobody}
    /\ Spend("elections", <<n, "is elected">>, Decided(s, [Newest(s) EXCEPT !.leader = n]))

Crash(n) ==
    /\ s.nodes[n].up
    /\ Spend("crashes", <<n, "crashes">>,
             {[s EXCEPT !.nodes[n] = [Idle(@) EXCEPT !.up = FALSE, !.applied = 0]]})

Restart(n) ==
    LET node == s.nodes[n]
        end == Len(node.log)
    IN  /\ ~node.up
        /\ \/ Do(<<n, "restarts with everything">>, Registered(s, n, "nothing", end))
           \/ \E cut \in node.synced..(IF end = 0 THEN 0 ELSE end - 1) :
                \/ Spend("tails", <<n, "restarts, cut to", cut>>, Registered(s, n, "tail", cut))
                \/ /\ ~Has("incarnation")
                   /\ Spend("tails", <<n, "goes on, cut to", cut>>, {Started(s, n, cut, cut)})
           \/ /\ Cardinality(Newest(s).replicas) > 1
              /\ Spend("wipes", <<n, "restarts with nothing">>, Registered(s, n, "everything", 0))

Alter ==
    LET d == Newest(s)
    IN  Spend("alters", <<"fsync always is", ~d.always>>,
              Decided(s, [d EXCEPT !.always = ~@, !.promised = IF d.always THEN {} ELSE @]))

\* A node that was moved away deletes its files.
Delete(n) ==
    LET node == s.nodes[n]
    IN  /\ node.up /\ node.log # <<>> /\ n \notin Seen(s, n).replicas
        /\ ~Has("confirmed") \/ n \notin Newest(s).replicas
        /\ Do(<<n, "deletes its files">>, {[s EXCEPT !.nodes[n].log = <<>>, !.nodes[n].synced = 0]})

\* Against `proposed`: a leader takes a try that failed for the end of its change.
Forget(n) ==
    /\ ~Has("proposed") /\ s.nodes[n].proposed # {}
    /\ Do(<<n, "forgets its proposal">>, {Advance([s EXCEPT !.nodes[n].proposed = {}], n)})

FromOutside ==
    \/ \E n \in Nodes : \/ Produce(n) \/ Propose(n)
                        \/ Fence(n) \/ Return(n) \/ Elect(n)
                        \/ Crash(n) \/ Restart(n) \/ Delete(n) \/ Forget(n)
    \/ \E wanted \in SUBSET Nodes : Cardinality(wanted) >= 2 /\ Move(wanted)
    \/ Alter

\* ---------------------------------------------------------------- what is checked

Next == ByItself \/ FromOutside

Init ==
    LET d == [epoch |-> 1, version |-> 1, leader |-> First, replicas |-> Nodes, isr |-> FirstIsr,
              target |-> {},                          \* of a move, or nobody
              assignment |-> [n \in Nodes |-> 1],     \* the version at which it was made a replica
              incarnation |-> [n \in Nodes |-> 1], alive |-> Nodes,
              always |-> FALSE,                       \* the topic's fsync setting
              promised |-> {},                        \* whose process only knew fsync always
              told |-> Unheard]                       \* <<epoch, end>>, while no copy is in sync
        Log(n) == IF n \in FirstIsr THEN <<<<1, 0>>>> ELSE <<>>
        Node(n) == [up |-> TRUE, incarnation |-> 1, log |-> Log(n),
                    applied |-> 1,                    \* the entry of the metadata that it acts on
                    synced |-> Len(Log(n)),           \* the part that it has counted as synced
                    said |-> {},                      \* at most one
                    hw |-> 0, start |-> 0,            \* this and the rest: of a leader
                    heard |-> Unheard,                \* <<assignment, incarnation, end>>
                    proposed |-> {}]                  \* at most one
        Follower(n) == Subscribed(n, Node(n), d)
        Heard(n) == IF n = First THEN <<>> ELSE <<1, 1, Len(Log(n))>>
        leader == [Node(First) EXCEPT !.hw = 1, !.heard = [n \in Nodes |-> Heard(n)]]
    IN  /\ did = <<"begin">>
        /\ s = [metadata |-> <<d>>, commands |-> {}, acknowledged |-> Log(First), broken |-> "",
                nodes |-> [n \in Nodes |-> IF n = First THEN leader ELSE Follower(n)],
                excused |-> {},                       \* records lost with the last copy in sync
                left |-> [records |-> Records, proposals |-> Proposals, moves |-> Moves,
                          fences |-> Fences, returns |-> Returns, elections |-> Elections,
                          crashes |-> Crashes, tails |-> Tails, wipes |-> Wipes, alters |-> Alters]]

\* Every member of the isr, as the metadata has it, has everything that was acknowledged.
IsrHasAcknowledged ==
    \A n \in Newest(s).isr :
        /\ Len(s.nodes[n].log) >= Len(s.acknowledged)
        /\ Cut(s.nodes[n].log, Len(s.acknowledged)) = s.acknowledged

OneRecordPerOffset == s.broken = ""

\* When nothing happens by itself any more, the leader has heard that each follower has everything,
\* and no proposal is open.
AllAreHeard ==
    LET d == Newest(s)
        leader == s.nodes[d.leader]
        Heard(n) == s.nodes[n].up /\ s.nodes[n].incarnation = d.incarnation[n]
                    => leader.heard[n] = <<d.assignment[n], d.incarnation[n], Len(leader.log)>>
    IN  \/ d.leader = Nobody
        \/ ~Leads(s, d.leader)
        \/ leader.proposed = {} /\ \A n \in (d.replicas \cap d.alive) \ {d.leader} : Heard(n)
        \/ IsBusy(s)

\* Of the model itself: that it comes to rest when it says so. Slow, so for a small scope.
BusyIsBusy == IsBusy(s) = ENABLED ByItself

=============================================================================
