-- needs: session keys
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
        -- Only these two are named on the wire (SES11); of the others a client knows nothing.
        local modes = mode .. ' ' .. fields[2]
        if modes == 'protocol transport' or modes == 'transport protocol' then
            return { 'other_mode', found }
        end
        return false
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
