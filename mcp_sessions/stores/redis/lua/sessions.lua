-- One session: it is made, admits requests, sleeps and ends. See commands.py for the lines that begin
-- with "script".

-- script create: session log
-- ARGV: now, log epoch, its place in the lists, then the fields of a new session
--
-- The session, and the place in the lists that nobody has then: that of this one if another lives
-- with the same id, or that of one whose time is over. And whether the session is new (0 or 1).
local now, epoch, member = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local known = redis.call('HMGET', base, 'expires', 'member')
-- Those who come in the same second have the same place.
local is_other = known[2] ~= member
if known[1] and not has_come(known[1], now) then
    return { { record(), is_other and member }, 0 }
end
if known[1] then
    delete()
end
redis.call('HSET', base, 'member', member, unpack(ARGV, 4))
local expires, ends, mode = unpack(redis.call('HMGET', base, 'expires', 'ends', 'mode'))
if mode ~= 'conversation' and mode ~= 'task' and mode ~= 'keys' then
    save(new_log('events', epoch))
end
move_deadline(now, expires, ends)
return { { record(), is_other and known[2] }, 1 }

-- script load: session
-- ARGV: now (empty: whatever its deadline), what changed the subscriptions that are known,
-- whether the client's description is known
local found = record(ARGV[2], ARGV[3])
if found and ARGV[1] ~= '' and has_come(found[1][DEADLINES.expires], ARGV[1]) then
    return false
end
return found

-- script admit: session keys
-- KEYS: a session; after it, if there is one, what may be its current session, into which the request
-- is let as well then
-- ARGV: owner, now; of each session: mode, its idle deadline from now on, the deadline that counts
-- ('expires' or 'ends'), fencing epoch (empty: any), what changed the subscriptions that are known,
-- whether the client's description is known; and of a request with a key, which is the last
-- session's: key, its cost, digest, runner, scopes, most bytes of keys, lifetime of keys, run, run
-- whose place it takes (empty: none)
--
-- The order of the questions is that of core/life.py: the owner first (SES8).
local owner, now = ARGV[1], tonumber(ARGV[2])
local OF_EACH = 6

-- Lets the request into one session, of which ARGV tells from a place on.
local function admit(at, epoch, has_key)
    local mode, found = ARGV[at], record(ARGV[at + 4], ARGV[at + 5])
    if not found then
        return false
    end
    local fields = found[1]
    if fields[3] ~= owner or has_come(fields[DEADLINES[ARGV[at + 2]]], now) then
        return false
    end
    if fields[2] ~= mode then
        -- Of the others a client knows nothing (SES11).
        return is_named(mode) and is_named(fields[2]) and { 'other_mode', found }
    end
    if epoch ~= '' and epoch ~= fields[9] then
        return { 'displaced', found }
    end
    fields[DEADLINES.expires] = move_deadline(now, ARGV[at + 1], fields[DEADLINES.ends])
    -- The place of one that slept has to be moved.
    local woken = redis.call('HDEL', base, 'slept') == 1 and redis.call('HGET', base, 'member')
    local key = 3 + OF_EACH * #KEYS
    if not has_key or not ARGV[key] then
        return { 'admitted', found, woken }
    end
    local all = open_keys(ARGV[key + 5], ARGV[key + 6])
    local begun, entry, answer = begin_key(
        all, ARGV[key], tonumber(ARGV[key + 1]), ARGV[key + 2], ARGV[key + 3], ARGV[key + 4], now,
        ARGV[key + 7], ARGV[key + 8])
    return {
        'admitted', found, woken, begun, entry and entry.runner, entry and entry.scopes, answer,
        entry and entry.run,
    }
end

local admitted = admit(3, ARGV[6], #KEYS == 1)
local current = admitted and admitted[1] == 'admitted' and KEYS[2] and admitted[2][1][11]
if not current then
    return admitted
end
-- Its id, and the fencing epoch that it is known by there.
current = cjson.decode(current)
base = KEYS[2]
if redis.call('HGET', base, 'id') ~= current[1] then
    return admitted
end
return { 'with current', admitted, admit(3 + OF_EACH, whole(current[2]), true) }

-- script touch: session
-- ARGV: now, then each mode and its idle deadline from now on
local ends, mode = unpack(redis.call('HMGET', base, 'ends', 'mode'))
local deadline = deadline_for(mode, 2)
if deadline and not has_come(ends, ARGV[1]) then
    move_deadline(tonumber(ARGV[1]), deadline, ends)
end
return false

-- script end: session
-- Its place in the lists, its record and the tokens of its subscriptions.
local member, gone = redis.call('HGET', base, 'member'), leave()
return { member, gone[2], gone[3] }

-- script expire: session
-- ARGV: now, the deadline that counts ('expires' or 'ends'), then each mode and its idle deadline from
-- now on
local now = ARGV[1]
local counts, expires, ends, mode = unpack(
    redis.call('HMGET', base, ARGV[2], 'expires', 'ends', 'mode'))
if not counts then
    return { 'gone' }
end
if not has_come(counts, now) then
    local deadline = has_come(expires, now) and deadline_for(mode, 3)
    return { 'later', deadline and move_deadline(tonumber(now), deadline, ends) or expires }
end
return leave()

-- script evict: session
-- ARGV: latest deadline, that of one that sleeps, whose, whom they make room for (0: anybody, 1: their
-- own, 2: bytes); if for anybody: whether one goes whose GET stream was open
local times = redis.call('HMGET', base, 'expires', 'ends', 'mode', 'owner', 'current', 'opened')
if not times[1] then
    return { 'gone' }
end
local expires, ends, mode = times[1], times[2], times[3]
local is_asleep, is_unused = has_come(expires, ARGV[2]), has_come(expires, ARGV[1])
if not (is_asleep or is_unused) then
    return { 'later', expires }
end

local function goes()
    if ARGV[4] == '2' then
        return is_asleep
    end
    if is_named(mode) and is_asleep then
        return ARGV[4] == '0' or times[4] == ARGV[3]
    end
    if times[4] ~= ARGV[3] or not is_unused then
        return false
    end
    if ARGV[4] == '1' then
        return mode == 'conversation' or mode == 'keys'
    end
    return mode == 'transport' and not times[5] and (not times[6] or ARGV[5] == '1')
        and redis.call('EXISTS', base .. ':u', base .. ':c') == 0
end

-- Where the lifetime ends first, nobody knows when it was used.
if has_come(ends, expires) or not goes() then
    return { 'kept' }
end
return leave()

-- script fall_asleep: session log
-- ARGV: new log epoch, latest deadline of one that sleeps
-- The deadline, if it is a later one; false: nothing is left to be done.
local expires, ends, mode = unpack(redis.call('HMGET', base, 'expires', 'ends', 'mode'))
if not expires then
    return false
end
if not has_come(expires, ARGV[2]) then
    return expires
end
if has_come(ends, expires) or not is_named(mode) then
    return false
end
for _, stream in ipairs(streams()) do
    if is_response(stream) then
        drop_stream(stream)
    end
end
redis.call('HSET', base, 'slept', '1')
for _, stream in ipairs({ 'events', 'get' }) do
    local log = open_log(stream, ARGV[1], seconds(ends))
    if log and log.count > 0 then
        redis.call('UNLINK', log.events, log.by_key)
        log.floor, log.evicted = log.head, log.head
        log.count, log.bytes, log.first = 0, 0, 0
        save(log)
    end
end
return false

-- script size: session
-- ARGV: latest deadline of one that sleeps
-- Bytes of a session that sleeps, as Redis counts them; of any other 0.
local expires, ends = unpack(redis.call('HMGET', base, 'expires', 'ends'))
if not expires or not has_come(expires, ARGV[1]) or has_come(ends, expires) then
    return 0
end
local bytes = 0
for _, key in ipairs(keys()) do
    bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0)
end
return bytes
